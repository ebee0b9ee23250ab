"""One string for one model: two workers may share KV only where it is equal.

Covers the facts of `config.json` that the computation uses, and of every tensor its name,
kind, shape and sampled bytes. Reads a few megabytes of a model of any size. Keeps no state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from baton.engine.spec import read_spec
from baton.engine.weights import shard_files
from baton.runtime.errors import ModelError

_SAMPLES = 16  # per tensor
_SAMPLE_BYTES = 256
_WHOLE_BYTES = 16 << 10  # smaller tensors (norms, biases) are read whole
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    name: str
    kind: str
    shape: tuple[int, ...]
    path: Path
    start: int  # in the file
    end: int


def model_fingerprint(folder: Path) -> str:
    """32 hex digits. How the tensors are spread over shards does not matter, nor what the end
    tokens are. Training changes nearly every value of the tensors it touches, so the samples
    tell a fine-tune from its base; a change of a few single values can go unseen. Raises
    ModelError for files that cannot be read."""
    digest = blake2b(digest_size=16, person=b"baton-model")
    facts = asdict(read_spec(folder))
    del facts["eos_ids"], facts["max_context"]
    digest.update(json.dumps(facts, sort_keys=True).encode())
    tensors = [tensor for path in shard_files(folder) for tensor in _header(path)]
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        digest.update(json.dumps([tensor.name, tensor.kind, tensor.shape]).encode())
        for piece in _samples(tensor):
            digest.update(piece)
    return digest.hexdigest()


def _header(path: Path) -> list[_StoredTensor]:
    """The tensors of a safetensors file: 8 bytes of length, then a JSON header."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, path.stat().st_size - 8):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = []
        for name, entry in header.items():
            start, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            if not 0 <= start <= end <= path.stat().st_size:
                raise ValueError(f"tensor {name} ends at byte {end}, beyond the file")
            shape = tuple(int(size) for size in entry["shape"])
            found.append(_StoredTensor(name, str(entry["dtype"]), shape, path, start, end))
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path}: not a readable safetensors file: {error}; download it again"
        ) from error


def _samples(tensor: _StoredTensor) -> Iterator[bytes]:
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
