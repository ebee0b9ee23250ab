"""A device that captures, as far as it can be faked, and the host's stand-in for one."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from baton.engine.execution import graph_device
from baton.engine.execution.graph_device import CudaDevice, HostDevice


def test_work_is_done_at_capture_and_at_each_replay() -> None:
    done = []
    replay = HostDevice().capture(lambda: done.append(len(done)))
    assert done == [0]
    replay()
    replay()
    assert done == [0, 1, 2]


def test_marks_tell_the_time_between_them() -> None:
    device = HostDevice()
    earlier, later = device.record_event(), device.record_event()
    later.wait()
    assert later.seconds_since(earlier) >= 0 >= earlier.seconds_since(later)


def test_host_room_is_zeros_of_its_kind() -> None:
    room = HostDevice().host_buffer(2, 3, torch.int32)
    assert room.shape == (2, 3) and room.dtype == torch.int32 and not room.any()


class Streams:
    """As `torch.cuda`, as far as a capture goes: what was called on which stream."""

    def __init__(self):
        self.calls, self.made, self.at = [], [], "current"

    def Stream(self, device):
        self.made.append(SimpleNamespace(wait_stream=lambda other: self.calls.append("wait")))
        return self.made[-1]

    def current_stream(self, device):
        return SimpleNamespace(wait_stream=lambda other: self.calls.append("waited for"))

    def graph_pool_handle(self):
        return "pool"

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.calls.append("replay"))

    @contextmanager
    def stream(self, stream):
        before, self.at = self.at, stream
        yield
        self.at = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        self.calls.append("begin")
        with self.stream(stream):
            yield
        self.calls.append("end")


def test_warm_up_and_all_graphs_are_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Streams()
    monkeypatch.setattr(graph_device.torch, "cuda", cuda)
    device = CudaDevice(torch.device("cuda", 0))
    at = []

    def work():
        at.append(cuda.at)
        cuda.calls.append("work")

    for _ in range(3):
        device.capture(work)()
    (stream,) = cuda.made
    assert at == [stream] * 6
    assert cuda.calls == 3 * ["wait", "work", "begin", "work", "end", "waited for", "replay"]
