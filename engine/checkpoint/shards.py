"""The safetensors files of a Hugging Face folder, mapped into memory.

What their headers say is shard_headers.py's. The files are mapped here, so that pages go back
to the system once they are copied. Knows no model. Files are only read.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.checkpoint.shard_files import shard_files
from baton.engine.checkpoint.shard_headers import StoredTensor, read_header
from baton.runtime.errors import ModelError

KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

Progress = Callable[[int, int], None]  # (bytes read so far, bytes in all), from any thread


class Shards:
    """All tensors of a folder. Threads may read different tensors at once."""

    def __init__(self, folder: Path, progress: Progress | None = None) -> None:
        """Raises ModelError for a missing, cut or malformed file."""
        self.folder = folder
        self._maps: dict[Path, mmap.mmap] = {}
        self._tensors: dict[str, StoredTensor] = {}
        self._used: set[str] = set()
        self._done_bytes = 0
        self._progress = progress
        self._lock = threading.Lock()
        for path in shard_files(folder):
            for tensor in read_header(path):
                if tensor.name in self._tensors:
                    raise tensor.error(f"is in {self._tensors[tensor.name].path.name} as well")
                self._tensors[tensor.name] = tensor
            with path.open("rb") as file:
                # A private mapping counts as writable, which torch asks for; nothing writes.
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.total_bytes = sum(tensor.end - tensor.start for tensor in self._tensors.values())

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def unused(self) -> Iterator[StoredTensor]:
        """The tensors that nobody has opened yet, in order of name."""
        return (self._tensors[name] for name in sorted(self._tensors.keys() - self._used))

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """Raises ModelError if no file holds it; `shape`, where known, is what was expected."""
        return self.find_whole(name, shape)

    def find_whole(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """The tensor as the file has it. Raises ModelError as `find` does."""
        if name not in self._tensors:
            asked = "" if shape is None else f", which asks for {list(shape)},"
            raise ModelError(
                f"{self.folder}: tensor {name} is in none of its {len(self._maps)} safetensors "
                f"files; config.json{asked} does not fit the weights, or a download is not complete"
            )
        return self._tensors[name]

    @contextmanager
    def open(self, name: str) -> Iterator[Tensor]:
        """The tensor in mapped memory, of its stored kind and shape; not to be written, and
        not to be kept beyond the block. Raises ModelError."""
        stored = self.find_whole(name)
        if stored.kind not in KINDS:
            raise stored.error(f"is of kind {stored.kind}, which is not known")
        with self._lock:
            self._used.add(name)
        size = stored.end - stored.start
        if size:
            file = self._maps[stored.path]
            flat = torch.frombuffer(file, dtype=torch.uint8, count=size, offset=stored.start)
            if flat.data_ptr() % 8:  # tensors of odd sizes come before it
                flat = flat.clone()
        else:
            flat = torch.empty(0, dtype=torch.uint8)
        yield flat.view(KINDS[stored.kind]).view(stored.shape)
        self._give_back(stored)
        self._tell(size)

    def finish(self) -> None:
        """Tell that all is read, whatever was left out."""
        if self._done_bytes < self.total_bytes:
            self._tell(self.total_bytes - self._done_bytes)

    def _give_back(self, stored: StoredTensor) -> None:
        """Unmap the tensor's whole pages: a model must not stand in memory twice."""
        first = -(-stored.start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = stored.end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[stored.path].madvise(mmap.MADV_DONTNEED, first, size)

    def _tell(self, size: int) -> None:
        with self._lock:
            self._done_bytes += size
            if self._progress is not None:
                self._progress(self._done_bytes, self.total_bytes)
