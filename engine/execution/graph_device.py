"""The device interface for captured steps: pinned memory, capture and replay, events.

`CudaDevice` is the real one. `HostDevice` does the same on a CPU without capturing, so that tests
run the same step code there. Each is used from one thread at a time, but
for `DeviceEvent`, which another thread may wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Replay = Callable[[], None]


class DeviceEvent(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Wait until the device has reached this event."""
        ...

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Return the device time between two events, both of which have been waited for."""
        ...


class GraphDevice(Protocol):
    torch_device: torch.device

    def host_buffer(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory [rows, columns] that the device can access by DMA."""
        ...

    def capture(self, work: Callable[[], None]) -> Replay:
        """Run `work` once, and return what repeats it on the same memory."""
        ...

    def record_event(self) -> DeviceEvent: ...


class CudaDevice:
    """One CUDA device. Its graphs share one memory pool, since they never run at once, and one
    stream for warm-up and capture: libraries keep memory for each stream that they have seen."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(torch_device)

    def host_buffer(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((rows, columns), dtype=dtype, pin_memory=True)

    def capture(self, work: Callable[[], None]) -> Replay:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            work()  # compiles kernels, allocates library memory
        graph = torch.cuda.CUDAGraph()
        # Other threads (movers) may call CUDA now: only this thread's calls are captured.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            work()
        torch.cuda.current_stream(self.torch_device).wait_stream(stream)
        return graph.replay

    def record_event(self) -> DeviceEvent:
        return _CudaEvent(self.torch_device)


class _CudaEvent:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class HostDevice:
    """The CPU: work runs when it is called, and a replay calls it again."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def host_buffer(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((rows, columns), dtype=dtype)

    def capture(self, work: Callable[[], None]) -> Replay:
        work()
        return work

    def record_event(self) -> DeviceEvent:
        return _HostEvent()


class _HostEvent:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        return

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, _HostEvent)
        return self._at - earlier._at
