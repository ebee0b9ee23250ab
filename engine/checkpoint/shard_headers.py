"""The header of a safetensors file: names, dtypes, shapes and byte ranges of tensors.

The format is 8 bytes of length, a JSON header, then the tensors' bytes. This reader rejects a
truncated or changed file and names the damaged tensor. Workers use it, and so does their
supervisor, which does not import torch. The module keeps no state.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from baton.runtime.errors import ModelError

_MAX_HEADER_BYTES = 100 << 20
DTYPE_BYTES = {
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
    dtype: str  # name in the file: "BF16"
    shape: tuple[int, ...]
    path: Path
    start: int  # in the file, bytes
    end: int

    def error(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: tensor {self.name} {list(self.shape)} {reason}")


def read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of one file. Raises ModelError with the damaged tensor and its defect."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise ValueError(f"the header has {length} bytes in a file of {file_bytes}")
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
        raise tensor.error(f"has the byte range {tensor.start} to {tensor.end}; download it again")
    if tensor.end > file_bytes:
        raise tensor.error(
            f"ends at byte {tensor.end}, but the file has {file_bytes} of its {whole_bytes} bytes: "
            "it is truncated; download it again"
        )
    if tensor.dtype in DTYPE_BYTES:
        needed = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        if tensor.end - tensor.start != needed:
            raise tensor.error(
                f"of dtype {tensor.dtype} needs {needed} bytes and has {tensor.end - tensor.start};"
                " download it again"
            )
