"""Admission: bounds how many requests are served and how many arrive; it refuses, without waiting.

    head came ─ arrival ─▶ body, tokens ─ ticket ─▶ placed, answered ─▶ end
                  └─▶ 503                   └─▶ 503

While no ticket is left, a request is refused before its body is read. While the limit of arriving
requests is reached, the one whose upload has made no progress for the longest time is ended for the
next one, so that bodies that never arrive keep no client out. A refusal carries the time until
there should be room; it grows with each refusal, so that refused clients do not all return at the
same moment. Each ticket is returned exactly once. Pure but for metrics: the
clock is given.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.runtime import metrics
from baton.runtime.errors import InvalidRequest, Overloaded, RateLimited

DEFAULT_RETRY_AFTER_S = 1.0  # before any request has ended
MAX_RETRY_AFTER_S = 30.0
WINDOW_S = 30.0  # of the ends that the rate is taken from
WINDOW_ENDS = 256


class Admission:
    """`tickets` bounds what is served, and what arrives beside it; `clock` gives seconds."""

    def __init__(self, tickets: int, clock: Callable[[], float]) -> None:
        self._tickets = tickets
        self._clock = clock
        self._retry_after = RetryAfterEstimator()
        self.taken = 0
        self.arriving = 0  # also those that have just been ended to make room
        # the upload without progress for the longest time first
        self._uploads: OrderedDict[object, Callable[[], None]] = OrderedDict()

    @contextmanager
    def arrival(self) -> Iterator[None]:
        """Receive a request within the block. Raises Overloaded if no ticket is left, or if as many
        requests as there are tickets already arrive and none can make room. An Overloaded that the
        block raises gets the time until there should be room, unless it is a tenant's own limit."""
        if self.taken >= self._tickets:
            raise self._refusal()
        if self.arriving >= self._tickets:
            if not self._uploads:
                raise self._refusal()
            _, make_room = self._uploads.popitem(last=False)
            make_room()
        self.arriving += 1
        try:
            yield
        except RateLimited:
            raise  # no ticket would help, so it takes no turn in the queue for them
        except Overloaded as error:
            error.retry_after_s = max(error.retry_after_s, self._retry_after.next_s(self._clock()))
            raise
        finally:
            self.arriving -= 1

    @contextmanager
    def upload(self, make_room: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Receive the body of an arriving request within the block, which calls the yielded
        function whenever a part of it has come. `make_room` is called at most once, and must then
        end the block soon."""
        key = object()
        self._uploads[key] = make_room

        def record_progress() -> None:
            if key in self._uploads:
                self._uploads.move_to_end(key)

        try:
            yield record_progress
        finally:
            self._uploads.pop(key, None)

    def check_number(self, number: int, field: str) -> None:
        """Raise InvalidRequest if one request needs more tickets than there are."""
        if number > self._tickets:
            raise InvalidRequest(
                f"{field}: {number} prompts, and router.max_requests serves {self._tickets} at "
                "once: divide the request",
                field,
            )

    @contextmanager
    def ticket(self) -> Iterator[None]:
        """Hold a ticket within the block. Raises Overloaded if none is left. An Overloaded that the
        block raises gets the time until there should be room."""
        if self.taken >= self._tickets:
            raise self._refusal()
        self.taken += 1
        metrics.ACTIVE_REQUESTS.set(self.taken)
        ended = True
        try:
            yield
        except Overloaded as error:
            ended = False
            error.retry_after_s = max(error.retry_after_s, self._retry_after.next_s(self._clock()))
            raise
        finally:
            self.taken -= 1
            metrics.ACTIVE_REQUESTS.set(self.taken)
            if ended:
                self._retry_after.record_end(self._clock())

    def _refusal(self) -> Overloaded:
        return Overloaded(
            f"{self._tickets} requests are being served: try again later",
            self._retry_after.next_s(self._clock()),
        )


class RetryAfterEstimator:
    """Estimates when a refused request should find room, from the rate of recent ends, as if all
    refused requests waited in a queue."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=WINDOW_ENDS)
        self._last_s = 0.0  # when the last refused request should find room

    def record_end(self, now_s: float) -> None:
        """Record that a request has made room."""
        self._ends.append(now_s)

    def next_s(self, now_s: float) -> float:
        """Return the seconds until one more refused request should find room."""
        while self._ends and self._ends[0] <= now_s - WINDOW_S:
            self._ends.popleft()
        if not self._ends:
            return DEFAULT_RETRY_AFTER_S
        interval_s = (now_s - self._ends[0]) / len(self._ends)
        self._last_s = min(max(self._last_s, now_s) + interval_s, now_s + MAX_RETRY_AFTER_S)
        return self._last_s - now_s
