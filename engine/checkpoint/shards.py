"""The safetensors files of a Hugging Face folder, mapped into memory.

The reader unmaps the pages of a tensor once it is copied. `shard_headers` reads the headers. The
module knows no model and only reads files.
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

DTYPES = {
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
        """Map the files. Raises ModelError for a missing, truncated or malformed file."""
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
                    raise tensor.error(
                        f"is also in {self._tensors[tensor.name].path.name}; download both"
                    )
                self._tensors[tensor.name] = tensor
            with path.open("rb") as file:
                # torch requires a writable buffer; a private mapping is one, and none writes.
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.total_bytes = sum(tensor.end - tensor.start for tensor in self._tensors.values())

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def unused(self) -> Iterator[StoredTensor]:
        """Return the tensors that have not been opened, sorted by name."""
        return (self._tensors[name] for name in sorted(self._tensors.keys() - self._used))

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """Return a tensor's header. Raises ModelError if no file has the tensor; `shape` is the
        expected shape, if known."""
        return self.find_whole(name, shape)

    def find_whole(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """Return the header of the whole tensor. Raises ModelError like `find`."""
        if name not in self._tensors:
            asked = "" if shape is None else f", which asks for {list(shape)},"
            raise ModelError(
                f"{self.folder}: tensor {name} is in none of its {len(self._maps)} safetensors "
                f"files; config.json{asked} does not fit the weights, or a download is incomplete"
            )
        return self._tensors[name]

    @contextmanager
    def open(self, name: str) -> Iterator[Tensor]:
        """Return the tensor in mapped memory, with its stored dtype and shape. The caller must not
        write it, nor keep it after the `with` block. Raises ModelError."""
        stored = self.find_whole(name)
        if stored.dtype not in DTYPES:
            raise stored.error(f"has the unknown dtype {stored.dtype}")
        with self._lock:
            self._used.add(name)
        size = stored.end - stored.start
        if size:
            file = self._maps[stored.path]
            flat = torch.frombuffer(file, dtype=torch.uint8, count=size, offset=stored.start)
            if flat.data_ptr() % 8:  # follows a tensor of odd size
                flat = flat.clone()
        else:
            flat = torch.empty(0, dtype=torch.uint8)
        yield flat.view(DTYPES[stored.dtype]).view(stored.shape)
        self._release_pages(stored)
        self._report_progress(size)

    def finish(self) -> None:
        """Report all bytes as read, including those of unread tensors."""
        if self._done_bytes < self.total_bytes:
            self._report_progress(self.total_bytes - self._done_bytes)

    def _release_pages(self, stored: StoredTensor) -> None:
        """Release the tensor's whole pages, so that memory never holds the model twice."""
        first = -(-stored.start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = stored.end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[stored.path].madvise(mmap.MADV_DONTNEED, first, size)

    def _report_progress(self, size: int) -> None:
        with self._lock:
            self._done_bytes += size
            if self._progress is not None:
                self._progress(self._done_bytes, self.total_bytes)
