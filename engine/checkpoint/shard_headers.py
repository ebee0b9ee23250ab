"""What the header of a safetensors file says: names, kinds, shapes, and where the bytes lie.

The format is 8 bytes of length, a JSON header, then the tensors' bytes. It is read here, so that
a file that was cut or changed is refused with the tensor that it breaks: by whoever loads it,
and by whoever starts workers, which has no torch. Keeps no state.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from baton.runtime.errors import ModelError

_MAX_HEADER_BYTES = 100 << 20
KIND_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    kind: str  # as the file says: "BF16"
    shape: tuple[int, ...]
    path: Path
    start: int  # in the file, bytes
    end: int

    def error(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: tensor {self.name} {list(self.shape)} {reason}")


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one file. Raises ModelError naming what is wrong with which tensor."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise ValueError(f"a header of {length} bytes in a file of {file_bytes}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = []
        for name, entry in header.items():
            start, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(size) for size in entry["shape"])
            found.append(StoredTensor(name, str(entry["dtype"]), shape, path, start, end))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path}: not a readable safetensors file: {error}; download it again"
        ) from error
    whole = max((tensor.end for tensor in found), default=0)
    for tensor in found:
        _check(tensor, 8 + length, file_bytes, whole)
    return found


def _check(tensor: StoredTensor, first: int, file_bytes: int, whole_bytes: int) -> None:
    if min(tensor.shape, default=0) < 0 or not first <= tensor.start <= tensor.end:
        raise tensor.error(f"lies from byte {tensor.start} to {tensor.end}; download it again")
    if tensor.end > file_bytes:
        raise tensor.error(
            f"ends at byte {tensor.end}, but the file has {file_bytes} of its {whole_bytes} bytes: "
            "it was cut; download it again"
        )
    if tensor.kind in KIND_BYTES:
        needed = math.prod(tensor.shape) * KIND_BYTES[tensor.kind]
        if tensor.end - tensor.start != needed:
            raise tensor.error(
                f"of kind {tensor.kind} needs {needed} bytes and has {tensor.end - tensor.start};"
                " download it again"
            )
