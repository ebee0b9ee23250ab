"""What capturing steps needs of a device: pinned memory, capture and replay, marks in time.

`CudaDevice` is the real one. `HostDevice` does the same on a CPU without capturing: the steps'
own code is the same on both, so tests run it here. Each is used from one thread at a time, but
for `Mark`, which another thread may wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Replay = Callable[[], None]


class Mark(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Until the device has come here."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Device time between two marks that both have been waited for."""
        ...


class GraphDevice(Protocol):
    torch_device: torch.device

    def host_room(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Host memory [rows, columns] that the device can copy from and to by itself."""
        ...

    def capture(self, work: Callable[[], None]) -> Replay:
        """Run `work` once, and return what repeats it on the same memory."""
        ...

    def mark(self) -> Mark: ...


class CudaDevice:
    """One CUDA device; its graphs share one pool of memory, since they never run at once, and one
    stream for warm-up and capture: libraries keep memory for each stream that they have seen."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]

    def host_room(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((rows, columns), dtype=dtype, pin_memory=True)

    def capture(self, work: Callable[[], None]) -> Replay:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            work()  # compiles kernels, and makes the libraries' own memory
        graph = torch.cuda.CUDAGraph()
        # Other threads (movers) may call CUDA meanwhile: only this thread's calls are captured.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            work()
        torch.cuda.current_stream(self.torch_device).wait_stream(stream)
        return graph.replay

    def mark(self) -> Mark:
        return _CudaMark(self.torch_device)


class _CudaMark:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class HostDevice:
    """A CPU: work is done when it is called, and replayed by calling it again."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def host_room(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((rows, columns), dtype=dtype)

    def capture(self, work: Callable[[], None]) -> Replay:
        work()
        return work

    def mark(self) -> Mark:
        return _HostMark()


class _HostMark:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        return

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _HostMark)
        return self._at - earlier._at
