"""One string for one model: two workers may share KV only where it is equal.

Covers the facts of `config.json` that the computation uses, and of every tensor its name,
kind, shape and sampled bytes. Reads a few megabytes of a model of any size. Keeps no state.
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
from baton.engine.spec.model_spec import read_spec

_SAMPLES = 16  # per tensor
_SAMPLE_BYTES = 256
_WHOLE_BYTES = 16 << 10  # smaller tensors (norms, biases) are read whole


def model_fingerprint(
    folder: Path,
    context: int = 0,
    numerics: str = "",
    quantization: str = "none",
    draft: str = "",
) -> str:
    """32 hex digits. `context` as in `read_spec`, since it may decide what the KV is;
    `numerics` names the bits of a deterministic engine, `quantization` what is made of plain
    weights at load, `draft` the fingerprint of a draft model, whose KV lies in the same blocks.

    How the tensors are spread over shards does not matter, nor what the end tokens are.
    Training changes nearly every value of the tensors it touches, so the samples tell a
    fine-tune from its base; a change of a few single values can go unseen. Raises ModelError
    for files that cannot be read."""
    digest = blake2b(digest_size=16, person=b"baton-model")
    beside = [draft] if draft else []
    digest.update(json.dumps([numerics, quantization, *beside]).encode())
    facts = asdict(read_spec(folder, context))
    del facts["eos_ids"], facts["max_context"]
    digest.update(json.dumps(facts, sort_keys=True).encode())
    tensors = [tensor for path in shard_files(folder) for tensor in read_header(path)]
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        digest.update(json.dumps([tensor.name, tensor.kind, tensor.shape]).encode())
        for piece in _samples(tensor):
            digest.update(piece)
    return digest.hexdigest()


def _samples(tensor: StoredTensor) -> Iterator[bytes]:
    """Evenly spread pieces, the first and the last bytes included."""
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
