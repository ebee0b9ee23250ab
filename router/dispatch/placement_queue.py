"""The queue of requests that wait for a worker: each is tried in order until a worker takes it.

    place ─▶ try ─▶ submitted
              │ no worker yet; for a retry, a full fleet too
              └──▶ queue ── one timer for all: is there room? ──▶ try again, a few at once

A full fleet refuses a new request at once. So does one that has room only for the retries that
wait: their clients may have a part of their answers. One that waits costs nothing until a decode
worker has room: no prompt is read before. Knows the submitter and attempts; the dispatcher decides
what waits, and how long. Owned by the loop.
"""

from __future__ import annotations

import asyncio
from itertools import islice

from baton.router.dispatch.attempt import Attempt
from baton.router.dispatch.submitter import Submitter
from baton.router.fleet.placement import BUSY_RETRY_S
from baton.router.fleet.unplaced_requests import UnplacedRequests
from baton.router.fleet.worker_link import WorkerLink
from baton.router.requests.deadline import passed
from baton.runtime.errors import BatonError, InvalidRequest, Overloaded, Unavailable

RETRY_S = 0.05  # between two tries of one request, and two looks for room
AT_ONCE = 8  # tried in one turn of the loop
TOKENS_AT_ONCE = 1 << 15  # of theirs, unless one alone has more: 8k take a millisecond of it
SPACING_S = 0.005  # between such turns: other requests' tokens pass
RETRIES_FIRST = "the room that workers have is for requests that lost theirs: try again later"
STOPPING = "the router stops: ask again"
TOO_SMALL = "no worker that could hold this request is left: ask again, or start one"


class PlacementQueue:
    def __init__(self, submitter: Submitter, unplaced: UnplacedRequests) -> None:
        self._submitter = submitter
        self._unplaced = unplaced
        # in order: not before which time, and how many tokens are then handed over
        self._waiting: dict[asyncio.Future[None], tuple[float, int]] = {}
        self._retries = 0  # that could not be placed yet
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def place(self, attempt: Attempt, wait_s: float, returned: bool = False) -> WorkerLink:
        """Try until a worker takes it, and return that worker's link. A missing worker is waited
        for. A full fleet refuses a new request at once, but not a retry; nor is a retry an invalid
        request where the workers that are left are too small for it."""
        if attempt.attempt == 1:
            self._check_room()
            return await self._place(attempt, wait_s, returned)
        self._retries += 1
        try:
            return await self._place(attempt, wait_s, returned)
        finally:
            self._retries -= 1

    def _check_room(self) -> None:
        """Raise Overloaded if there is room, but only for the retries that wait. Without any room
        the try itself knows why."""
        if self._retries and 0 < self._submitter.room() <= self._retries:
            self._unplaced.refused += 1
            raise Overloaded(RETRIES_FIRST, BUSY_RETRY_S)

    async def _place(self, attempt: Attempt, wait_s: float, returned: bool) -> WorkerLink:
        deadline_s = attempt.active_request.deadline_s
        until_s = _now() + wait_s
        error: BatonError | None = None
        while True:
            if attempt.active_request.over:
                raise attempt.active_request.error or Unavailable(STOPPING)
            if _now() >= deadline_s:
                raise passed("placing", error)
            try:
                return self._submitter.try_place(attempt)
            except BatonError as refused:
                error = refused.with_traceback(None)  # which holds this frame, a cycle
            if isinstance(error, InvalidRequest) and attempt.attempt > 1:
                error = Unavailable(TOO_SMALL)
            final = isinstance(error, InvalidRequest | Overloaded) and attempt.attempt == 1
            if final or (_now() >= until_s and not returned):
                self._unplaced.refused += isinstance(error, Overloaded)
                raise error
            if _now() >= until_s:
                raise Unavailable(
                    f"a worker stopped and returned the request, and in {wait_s:g} s no other "
                    f"could take it: {error}"
                )
            await self._turn(attempt.length, min(until_s, deadline_s))

    def wake(self) -> None:
        """Make all waiting requests check at once whether they may wait longer."""
        for turn in list(self._waiting):
            self._call(turn)

    async def _turn(self, tokens: int, until_s: float) -> None:
        """Wait until there is room for a try, or until that time."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting[turn] = loop.time() + RETRY_S, tokens
        self._report_waiting()
        if self._timer is None:
            self._timer = loop.call_later(RETRY_S, self._look)
        end = loop.call_at(until_s, self._call, turn)
        try:
            await turn  # bounded by `end`
        finally:
            end.cancel()
            self._waiting.pop(turn, None)
            self._report_waiting()

    def _report_waiting(self) -> None:
        self._unplaced.waiting = len(self._waiting)

    def _look(self) -> None:
        """Wake the requests in front: as many as there is room for and one turn has time for."""
        self._timer = None
        soon_s, tokens = _now() + SPACING_S, 0
        called: list[asyncio.Future[None]] = []
        first = islice(self._waiting.items(), min(AT_ONCE, self._submitter.room()))
        for turn, (rested_s, length) in first:
            tokens += length
            if rested_s > soon_s or (called and tokens > TOKENS_AT_ONCE):
                break
            called.append(turn)
        for turn in called:
            self._call(turn)
        if self._waiting:
            pause_s = SPACING_S if called else RETRY_S
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._look)

    def _call(self, turn: asyncio.Future[None]) -> None:
        self._waiting.pop(turn, None)
        if not turn.done():
            turn.set_result(None)


def _now() -> float:
    return asyncio.get_running_loop().time()
