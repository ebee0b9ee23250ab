"""The report of a fetch: the bytes read, and when each offer was received, read and verified.

It is pure bookkeeping for metrics, spans and benchmarks and decides nothing. The handoff's reader
owns it. Times are the event loop's, in seconds; a time is undefined if its event did not happen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.runtime.telemetry.timeline import covered


@dataclass(slots=True)
class OfferTimes:
    """The times of one offer of `blocks` indices from `first` on, and the READs for it: all of
    those that took one of its blocks, with rereads."""

    first: int
    blocks: int
    received: float
    landed: float = 0.0  # its last READ
    verified: float = 0.0  # its last block
    bytes: int = 0
    reads: int = 0
    _unverified: int = 0

    def __post_init__(self) -> None:
        self._unverified = self.blocks

    def hidden_s(self, first_tokens: float) -> float:
        """Return how much of its time had passed when the first tokens came."""
        return max(0.0, min(self.verified, first_tokens) - self.received)


@dataclass(slots=True)
class FetchReport:
    """The counts and times of one fetch. `offers` are in the order of their indices."""

    transport: str = ""  # of its READs, in a word or two
    bytes: int = 0  # read, with rereads
    reads: int = 0
    rereads: int = 0  # READs of blocks with a wrong checksum
    reread_blocks: int = 0  # of those READs
    wrong_blocks: int = 0  # with wrong checksums, counted per READ
    started: float = 0.0
    opened: float = 0.0
    first_offer: float = 0.0
    first_tokens: float = 0.0
    last_offer: float = 0.0
    verified: float = 0.0
    offers: list[OfferTimes] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.verified - self.started

    @property
    def read_s(self) -> float:
        """The time in which at least one offer had been received and had not landed."""
        return covered((offer.received, offer.landed) for offer in self.offers)

    def record_offer(self, indices: range, now: float) -> None:
        self.offers.append(OfferTimes(indices.start, len(indices), now))
        self.offers.sort(key=lambda offer: offer.first)

    def record_read(self, indices: Sequence[int], block_bytes: int) -> None:
        """Record a READ that begins now."""
        self.reads += 1
        self.bytes += len(indices) * block_bytes
        taken: dict[int, OfferTimes] = {}
        for offer, blocks in self._runs(indices):
            offer.bytes += blocks * block_bytes
            taken[offer.first] = offer
        for offer in taken.values():
            offer.reads += 1

    def record_landed(self, indices: Sequence[int], now: float) -> None:
        for offer, _ in self._runs(indices):
            offer.landed = now

    def record_verified(self, indices: Sequence[int], now: float) -> None:
        """Record that these indices are verified, each once."""
        for offer, blocks in self._runs(indices):
            offer._unverified -= blocks
            if offer._unverified == 0:
                offer.verified = now

    def _runs(self, indices: Sequence[int]) -> Iterator[tuple[OfferTimes, int]]:
        """Yield the offers of `indices` in turn, each with how many of its blocks follow each
        other there. An offer is looked up once for a run: this is on the decode worker's loop."""
        offer: OfferTimes | None = None
        first = end = count = 0
        for index in indices:
            if not first <= index < end:
                if offer is not None:
                    yield offer, count
                offer, count = self._offer(index), 0
                first, end = offer.first, offer.first + offer.blocks
            count += 1
        if offer is not None:
            yield offer, count

    def _offer(self, index: int) -> OfferTimes:
        return self.offers[bisect_right(self.offers, index, key=lambda offer: offer.first) - 1]
