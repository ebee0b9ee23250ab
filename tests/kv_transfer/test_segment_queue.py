"""What waits to be posted: in order of a peer, in turns between peers, and not once abandoned."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from baton.kv_transfer.read_segments import ReadSegment, SegmentedRead, cut
from baton.kv_transfer.segment_queue import SegmentQueue
from baton.runtime.errors import ReadFailed

ONE, OTHER = b"1" * 16, b"2" * 16

Ends = list[ReadFailed | None]


def added(queue: SegmentQueue, peer: bytes = ONE, segments: int = 3) -> tuple[SegmentedRead, Ends]:
    """A READ of so many segments that waits, and where its end is noted."""
    ends: Ends = []
    made = cut(peer, range(segments), range(segments), 1, None, ends.append)
    queue.add(made)
    return made[0].read, ends


def taken(queue: SegmentQueue, full: set[bytes] | None = None) -> ReadSegment:
    segment = queue.take(full or set())
    assert segment is not None
    return segment


def test_pieces_of_a_peer_go_in_order_and_peers_take_turns() -> None:
    queue = SegmentQueue()
    first, second, other = added(queue)[0], added(queue, segments=1)[0], added(queue, OTHER)[0]
    order = [(segment.read, segment.first) for segment in (taken(queue) for _ in range(7))]
    assert order == [
        (first, 0),
        (other, 0),
        (first, 1),
        (other, 1),
        (first, 2),
        (other, 2),
        (second, 0),
    ]
    assert queue.take() is None and len(queue) == 0


def test_a_full_peer_delays_no_other() -> None:
    queue = SegmentQueue()
    added(queue)
    other, _ = added(queue, OTHER)
    assert [taken(queue, {ONE}).read for _ in range(3)] == [other] * 3
    assert queue.take({ONE}) is None and len(queue) == 3


def test_a_failure_ends_with_the_last_piece_in_flight() -> None:
    queue = SegmentQueue()
    read, ends = added(queue, segments=4)
    failed, other = taken(queue), taken(queue)
    failure = ReadFailed("gone")
    queue.ended(failed, failure)
    assert len(queue) == 0 and not ends
    queue.ended(other, None)
    assert ends == [failure] and read.under_way == 0


def test_an_abandoned_read_that_waits_has_ended_at_once() -> None:
    queue = SegmentQueue()
    (read, ends), (next_one, _) = added(queue), added(queue)
    assert queue.abandon(read) and not queue.abandon(read)
    assert not ends  # who abandoned it knows
    assert isinstance(read.failure, ReadFailed)
    assert taken(queue).read is next_one


def test_an_abandoned_read_ends_with_what_is_under_way_of_it() -> None:
    queue = SegmentQueue()
    read, ends = added(queue)
    under_way = [taken(queue), taken(queue)]
    assert not queue.abandon(read) and queue.take() is None
    for segment in under_way:
        assert not ends
        queue.ended(segment, None)
    assert ends == [read.failure] and "abandoned" in str(read.failure)


def test_abandoning_what_has_ended_changes_nothing() -> None:
    queue = SegmentQueue()
    read, ends = added(queue, segments=1)
    queue.ended(taken(queue), None)
    assert not queue.abandon(read) and ends == [None]


def test_a_read_progresses_by_its_pieces_or_those_before_it() -> None:
    queue = SegmentQueue()
    (first, _), (second, _), (other, _) = added(queue), added(queue), added(queue, OTHER)
    made = queue.moved_at(second)
    # The clock has to differ from the time before.
    time.sleep(0.01)
    segment = taken(queue)
    assert queue.moved_at(first) > made  # it was posted
    assert queue.moved_at(second) == made  # which is no room for the next
    assert queue.moved_at(other) == other.moved_at  # another peer's link
    # The clock has to differ from the time before.
    time.sleep(0.01)
    queue.ended(segment, None)
    ended = queue.moved_at(first)
    assert queue.moved_at(second) == ended > made  # room for one
    assert queue.moved_at(other) == other.moved_at < ended
    last = [taken(queue, {OTHER}) for _ in range(3)][-1]
    assert last.read is second
    posted = queue.moved_at(second)
    # The clock has to differ from the time before.
    time.sleep(0.01)
    assert queue.abandon(first) is False
    assert queue.moved_at(second) == posted


def test_what_ends_before_it_is_no_progress_of_a_read_under_way() -> None:
    queue = SegmentQueue()
    (first, _), (second, _) = added(queue, segments=2), added(queue, segments=2)
    one, _, _ = (taken(queue) for _ in range(3))
    posted = queue.moved_at(second)
    # The clock has to differ from the time before.
    time.sleep(0.01)
    queue.ended(one, None)
    assert queue.moved_at(first) > posted == queue.moved_at(second)


def test_concurrent_ends_and_abandons_report_each_end_once() -> None:
    queue, reads, threads = SegmentQueue(), 300, 4
    made = [added(queue, segments=5) for _ in range(reads)]
    together = threading.Barrier(threads + 1)

    def copy() -> None:
        together.wait(30)
        while (segment := queue.take()) is not None:
            queue.ended(segment, None)

    def leave() -> list[bool]:
        together.wait(30)
        return [queue.abandon(read) for read, _ in reversed(made)]

    with ThreadPoolExecutor(threads + 1) as pool:
        copying = [pool.submit(copy) for _ in range(threads)]
        left = pool.submit(leave).result(30)
        for running in copying:
            running.result(30)
    assert len(queue) == 0
    for (read, ends), at_once in zip(made, reversed(left), strict=True):
        assert len(ends) + at_once == 1 and read.under_way == 0
