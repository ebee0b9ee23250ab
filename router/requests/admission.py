"""Admission: a fixed number of tickets, and of requests on their way to one; no waiting.

    head came ─ arrival ─▶ body, tokens ─ ticket ─▶ placed, answered ─▶ end
                  └─▶ 503                   └─▶ 503

While no ticket is left a request is refused before its body is read. While as many arrive as
may, the one whose body has brought nothing for the longest time makes room for the next: bodies
that never come keep nobody out. Who is refused is told when there should be room, as if all who
were refused stood in line: so they do not all come back at the same moment. Pure: the clock is
given. Whoever takes a ticket gives it back exactly once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.runtime import metrics
from baton.runtime.errors import Overloaded

UNKNOWN_S = 1.0  # to wait, where nothing has ended yet
LONGEST_S = 30.0  # nobody is sent away for longer
WINDOW_S = 30.0  # of the ends that count for the pace
WINDOW_ENDS = 256


class Admission:
    """`tickets` bounds what is served, and what arrives beside it; `clock` gives seconds."""

    def __init__(self, tickets: int, clock: Callable[[], float]) -> None:
        self._tickets = tickets
        self._clock = clock
        self._line = RetryAfterEstimator()
        self.taken = 0
        self.arriving = 0  # those that were just told to make room too
        # of bodies that are awaited, the one that has been silent longest first
        self._uploads: OrderedDict[object, Callable[[], None]] = OrderedDict()

    @contextmanager
    def arrival(self) -> Iterator[None]:
        """Within the block a request is received. Raises Overloaded if it had to be refused
        a ticket now, or as many requests as there are tickets arrive already and none of them
        makes room; one that the block raises is given the time until there should be room."""
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
        except Overloaded as error:
            error.retry_after_s = max(error.retry_after_s, self._line.join(self._clock()))
            raise
        finally:
            self.arriving -= 1

    @contextmanager
    def upload(self, make_room: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Within the block the body of a request that arrives is awaited; the block gets what is
        to be called when some of it has come. `make_room` is called at most once, and then has to
        end the block soon."""
        key = object()
        self._uploads[key] = make_room

        def heard() -> None:
            if key in self._uploads:
                self._uploads.move_to_end(key)

        try:
            yield heard
        finally:
            self._uploads.pop(key, None)

    @contextmanager
    def ticket(self) -> Iterator[None]:
        """Hold a ticket within the block. Raises Overloaded if none is left; one that the block
        raises is given the time until there should be room."""
        if self.taken >= self._tickets:
            raise self._refusal()
        self.taken += 1
        metrics.ACTIVE_REQUESTS.set(self.taken)
        ended = True
        try:
            yield
        except Overloaded as error:
            ended = False
            error.retry_after_s = max(error.retry_after_s, self._line.join(self._clock()))
            raise
        finally:
            self.taken -= 1
            metrics.ACTIVE_REQUESTS.set(self.taken)
            if ended:
                self._line.ended(self._clock())

    def _refusal(self) -> Overloaded:
        return Overloaded(
            f"{self._tickets} requests are being served: try again later",
            self._line.join(self._clock()),
        )


class RetryAfterEstimator:
    """When the next who is refused may expect room. The pace is that of the last ends."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=WINDOW_ENDS)
        self._last_s = 0.0  # when the last in line may expect room

    def ended(self, now_s: float) -> None:
        """A request has made room."""
        self._ends.append(now_s)

    def join(self, now_s: float) -> float:
        """Seconds until it is the turn of one more, who now is the last in line."""
        while self._ends and self._ends[0] <= now_s - WINDOW_S:
            self._ends.popleft()
        if not self._ends:
            return UNKNOWN_S
        pace_s = (now_s - self._ends[0]) / len(self._ends)
        self._last_s = min(max(self._last_s, now_s) + pace_s, now_s + LONGEST_S)
        return self._last_s - now_s
