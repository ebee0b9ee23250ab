"""The bytes of request bodies that the router holds: a bound over all of them, and one per API key.

    head came ─▶ account ── hold(bytes) as they come ──▶ parsed, tokenized ─▶ released
                              └─ beyond a bound: silent uploads make room, else RateLimited

A body counts with what has arrived of it, not with what its head announces, and until its prompt
is tokenized. An upload that has brought nothing for SILENT_S makes room for one that goes on, so
stalled clients cannot use a bound up. Every operation is O(1), apart from the uploads that it
ends. Pure: the clock is given. Owned by the router's event loop.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.runtime import metrics
from baton.runtime.config import RouterConfig
from baton.runtime.errors import RateLimited

SILENT_S = 1.0  # without PROGRESS_BYTES; then an upload may have to make room
PROGRESS_BYTES = 16 << 10


@dataclass(slots=True)
class _Share:
    """The bytes that one tenant holds, or all tenants together. `uploads` are the bodies that are
    still arriving, the one without progress for the longest time first; `bodies` counts them and
    those that have arrived."""

    limit_bytes: int
    message: str
    label: str
    held_bytes: int = 0
    bodies: int = 0
    uploads: OrderedDict[HeldBody, None] = field(default_factory=OrderedDict)

    def make_room(self, wanted_bytes: int, asking: HeldBody, now_s: float) -> None:
        """End silent uploads until so many bytes more fit. Raises RateLimited if they never do."""
        while self.held_bytes + wanted_bytes > self.limit_bytes:
            oldest = next(iter(self.uploads), asking)
            if oldest is asking or now_s - oldest.progress_s < SILENT_S:
                raise self.refusal()
            oldest.make_room(self.refusal())

    def refusal(self) -> RateLimited:
        metrics.BODY_REFUSALS.labels(self.label).inc()
        return RateLimited(self.message)


class BodyBudget:
    """`key_bytes` bounds one tenant's bodies, `total_bytes` those of all; `clock` gives seconds."""

    def __init__(self, total_bytes: int, key_bytes: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._key_bytes = key_bytes
        self._all = _Share(
            total_bytes,
            f"the bodies that the router receives hold {total_bytes} bytes already: "
            "try again later",
            "all",
        )
        self._tenants: dict[bytes, _Share] = {}

    @property
    def held_bytes(self) -> int:
        return self._all.held_bytes

    @contextmanager
    def account(self, tenant: bytes) -> Iterator[HeldBody]:
        """Account for one body of this tenant within the block; its end releases the bytes."""
        share = self._tenants.get(tenant)
        if share is None:
            share = self._tenants[tenant] = _Share(
                self._key_bytes,
                f"the bodies of this API key's requests hold {self._key_bytes} bytes already "
                "(its share): send fewer at a time, or try again later",
                "key",
            )
        share.bodies += 1
        body = HeldBody((share, self._all), self._clock)
        try:
            yield body
        finally:
            body.release()
            share.bodies -= 1
            if not share.bodies:
                del self._tenants[tenant]


def body_budget(config: RouterConfig, clock: Callable[[], float]) -> BodyBudget:
    """Return the budget of these settings: a key's share has room for the largest body, and
    without API keys all bodies are one tenant's."""
    share_bytes = round(config.key_bodies_share * config.bodies_bytes)
    key_bytes = max(config.max_body_bytes, share_bytes) if config.api_keys else sys.maxsize
    return BodyBudget(config.bodies_bytes, key_bytes, clock)


class HeldBody:
    """One body. `progress_s` is the time of its last progress, or of its first byte."""

    def __init__(self, shares: tuple[_Share, _Share], clock: Callable[[], float]) -> None:
        self._shares = shares
        self._clock = clock
        self._held_bytes = 0
        self._progress_bytes = 0
        self._give_up: Callable[[RateLimited], None] | None = None
        self._refusal: RateLimited | None = None
        self.progress_s = 0.0

    @contextmanager
    def upload(self, give_up: Callable[[RateLimited], None]) -> Iterator[None]:
        """Receive the body within the block. If it has to make room, `give_up` is called, once, and
        must end the block soon."""
        self._give_up = give_up
        try:
            yield
        finally:
            self._give_up = None
            self._leave_uploads()

    def hold(self, size_bytes: int) -> None:
        """Set the bytes of this body. Raises RateLimited if they are too many, or if the body had
        to make room."""
        if self._refusal is not None:
            raise self._refusal
        grown = size_bytes - self._held_bytes
        now_s = self._clock()
        if grown > 0:
            self._note_progress(size_bytes, now_s)
            for share in self._shares:
                share.make_room(grown, self, now_s)
        self._count(grown)

    def make_room(self, refusal: RateLimited) -> None:
        """End this upload for another one."""
        self._refusal = refusal
        self.release()
        if self._give_up is not None:
            self._give_up(refusal)

    def release(self) -> None:
        self._leave_uploads()
        self._count(-self._held_bytes)

    def _count(self, grown: int) -> None:
        self._held_bytes += grown
        for share in self._shares:
            share.held_bytes += grown
        metrics.BODY_BYTES.set(self._shares[-1].held_bytes)

    def _note_progress(self, size_bytes: int, now_s: float) -> None:
        first = not self._progress_bytes
        if self._give_up is None or not (
            first or size_bytes - self._progress_bytes >= PROGRESS_BYTES
        ):
            return
        self._progress_bytes, self.progress_s = size_bytes, now_s
        self._leave_uploads()
        for share in self._shares:
            share.uploads[self] = None

    def _leave_uploads(self) -> None:
        for share in self._shares:
            share.uploads.pop(self, None)
