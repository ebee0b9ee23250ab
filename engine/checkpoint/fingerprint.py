"""The fingerprint of a model: two workers may share KV only if theirs are equal.

It covers the fields of `config.json` that the computation uses, and the name, dtype, shape and
sampled bytes of every tensor. It reads a few megabytes of a model of any size and keeps no state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

from baton.engine.checkpoint.shard_files import shard_files
from baton.engine.checkpoint.shard_headers import StoredTensor, read_header
from baton.engine.spec.eagle3_spec import describes_eagle3, read_eagle3_spec
from baton.engine.spec.model_spec import ModelSpec, read_spec

_SAMPLES = 16  # per tensor
_SAMPLE_BYTES = 256
_WHOLE_BYTES = 16 << 10  # smaller tensors (norms, biases) are read whole


def model_fingerprint(
    folder: Path,
    context: int = 0,
    numerics: str | None = None,
    quantization: str = "none",
    draft: str | None = None,
) -> str:
    """Return 32 hex digits. `context` is that of `read_spec`, since it may decide the KV;
    `numerics` identifies the bits of a deterministic engine, `quantization` the quantisation at
    load, `draft` the fingerprint of a draft model or head, whose KV lies in the same blocks.

    The division of tensors into shards and the end tokens do not matter. Training changes nearly
    every value of a tensor, so the samples distinguish a fine-tuned model from its base; a change
    of a few single values may go undetected. Raises ModelError for files that cannot be read."""
    digest = blake2b(digest_size=16, person=b"baton-model")
    beside = [] if draft is None else [draft]
    numerics = "" if numerics is None else numerics
    digest.update(json.dumps([numerics, quantization, *beside]).encode())
    facts = _facts(folder, context)
    digest.update(json.dumps(facts, sort_keys=True).encode())
    tensors = [tensor for path in shard_files(folder) for tensor in read_header(path)]
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        digest.update(json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
        for piece in _samples(tensor):
            digest.update(piece)
    return digest.hexdigest()


def _facts(folder: Path, context: int) -> dict[str, object]:
    """Return the parts of `config.json` that are computed with, of a model or EAGLE-3 head."""
    if not describes_eagle3(folder):
        return _computed(read_spec(folder, context))
    head = read_eagle3_spec(folder, context)
    return {**asdict(head), "layer": _computed(head.layer)}


def _computed(spec: ModelSpec) -> dict[str, object]:
    facts = asdict(spec)
    del facts["eos_ids"], facts["max_context"]
    if facts["experts"] is not None:
        del facts["experts"]["held"]  # of one rank, not of the model
    return facts


def _samples(tensor: StoredTensor) -> Iterator[bytes]:
    """Yield evenly spaced pieces of a tensor, with its first and its last bytes."""
    size = tensor.end - tensor.start
    descriptor = os.open(tensor.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        if size <= _WHOLE_BYTES:
            yield os.pread(descriptor, size, tensor.start)
            return
        for index in range(_SAMPLES):
            offset = (size - _SAMPLE_BYTES) * index // (_SAMPLES - 1)
            yield os.pread(descriptor, _SAMPLE_BYTES, tensor.start + offset)
    finally:
        os.close(descriptor)
