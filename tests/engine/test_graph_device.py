"""The host's stand-in for a device that captures."""

import torch

from baton.engine.graph_device import HostDevice


def test_work_is_done_at_capture_and_at_each_replay():
    done = []
    replay = HostDevice().capture(lambda: done.append(len(done)))
    assert done == [0]
    replay()
    replay()
    assert done == [0, 1, 2]


def test_marks_tell_the_time_between_them():
    device = HostDevice()
    earlier, later = device.mark(), device.mark()
    later.wait()
    assert later.seconds_since(earlier) >= 0 >= earlier.seconds_since(later)


def test_host_room_is_zeros_of_its_kind():
    room = HostDevice().host_room(2, 3, torch.int32)
    assert room.shape == (2, 3) and room.dtype == torch.int32 and not room.any()
