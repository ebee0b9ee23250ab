"""A fetch in figures: what was read, and when each offer was heard, landed and verified.

Pure bookkeeping for metrics, spans and benchmarks; decides nothing. The handoff's reader owns
it. Times are the event loop's, in seconds; those of what was not reached mean nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class OfferTimes:
    """One offer, of `blocks` places from `first` on."""

    first: int
    blocks: int
    heard: float
    landed: float = 0.0  # its last READ
    verified: float = 0.0  # its last block
    _unverified: int = 0

    def __post_init__(self) -> None:
        self._unverified = self.blocks


@dataclass(slots=True)
class FetchReport:
    """`offers` are in order of their places, as a granter offers them."""

    bytes: int = 0  # read, those read again included
    reads: int = 0
    rereads: int = 0  # READs of blocks whose sums were wrong at first
    reread_blocks: int = 0  # of those READs
    wrong_blocks: int = 0  # whose bytes were not the ones offered, at the first READ or the second
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

    def heard(self, places: range, now: float) -> None:
        self.offers.append(OfferTimes(places.start, len(places), now))
        self.offers.sort(key=lambda offer: offer.first)

    def landed(self, places: Sequence[int], now: float) -> None:
        for place in places:
            self._offer(place).landed = now

    def proven(self, places: Sequence[int], now: float) -> None:
        """These places are verified, each once."""
        for offer in map(self._offer, places):
            offer._unverified -= 1
            if offer._unverified == 0:
                offer.verified = now

    def _offer(self, place: int) -> OfferTimes:
        return self.offers[bisect_right(self.offers, place, key=lambda offer: offer.first) - 1]
