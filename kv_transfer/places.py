"""What a reader knows of the blocks it fetches: offered, summed, verified, by place.

A place is an index into the sequence's block table. Everything a granter says goes through here
and is checked before it is used: ids within its pool, places within the fetch, nothing twice.
Pure: reads nothing and sends nothing. The handoff's reader owns it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.checksum import block_seed, partial_tag
from baton.kv_transfer.mover import PeerPool
from baton.proto import handoff_pb2
from baton.runtime.errors import HandoffError

_SUM_BYTES = 8


class Places:
    """Places `opening.held_blocks` up to the end of the prompt, and the own block of each.

    `identities` are those of the full blocks; one fewer than `blocks` where the last block is
    partial. Raises ValueError if the two do not fit.
    """

    def __init__(
        self,
        opening: handoff_pb2.OpenHandoff,
        blocks: Sequence[int],
        identities: Sequence[bytes],
        peer: PeerPool,
        slabs: int,
    ) -> None:
        if len(blocks) - len(identities) not in (0, 1):
            raise ValueError(f"{len(identities)} identities do not fit {len(blocks)} blocks")
        self.first = opening.held_blocks
        self.end = self.first + len(blocks)
        self._full = self.first + len(identities)  # places before this one hold full blocks
        self._tokens = len(opening.tokens)
        self._handoff_id = opening.handoff_id
        self._peer = peer
        self._slabs = slabs
        self._own = list(blocks)
        self._tags = list(identities)
        self._offered: dict[int, int] = {}  # place to the granter's block
        self._sums: dict[int, bytes] = {}  # of each place's slabs
        self._verified: set[int] = set()

    @property
    def complete(self) -> bool:
        return len(self._verified) == len(self._own)

    @property
    def all_offered(self) -> bool:
        return len(self._offered) == len(self._own)

    def offered(self, offer: handoff_pb2.Offer) -> range:
        """Take an offer; its places. Raises HandoffError for one that cannot be."""
        places = range(offer.first, offer.first + len(offer.blocks))
        if not places:
            raise HandoffError("the granter made an empty offer")
        self._check_range(places)
        if offer.partial_tokens:
            self._check_partial(places, offer.partial_tokens)
            self._tags.append(partial_tag(self._handoff_id, offer.partial_tokens))
        elif places.stop > self._full:
            raise HandoffError(f"the granter offers place {self._full} as a full block")
        for place, block in zip(places, offer.blocks, strict=True):
            if block >= self._peer.num_blocks:
                raise HandoffError(
                    f"the granter offers block {block} of a pool of {self._peer.num_blocks}"
                )
            if place in self._offered:
                raise HandoffError(f"the granter offers place {place} twice")
            self._offered[place] = block
        return places

    def summed(self, sums: handoff_pb2.Checksums) -> None:
        """Take the sums of offered blocks. Raises HandoffError for those of others."""
        count, rest = divmod(len(sums.checksums), self._slabs)
        if rest or not count:
            raise HandoffError(f"{len(sums.checksums)} sums are not {self._slabs} for each block")
        places = range(sums.first, sums.first + count)
        self._check_range(places)
        packed, width = array("Q", sums.checksums).tobytes(), self._slabs * _SUM_BYTES
        for place, start in zip(places, range(0, len(packed), width), strict=True):
            if place not in self._offered or place in self._sums:
                raise HandoffError(f"the granter's sums of place {place} are out of order")
            self._sums[place] = packed[start : start + width]

    def remote(self, places: Sequence[int]) -> list[int]:
        return [self._offered[place] for place in places]

    def own(self, places: Sequence[int]) -> list[int]:
        return [self._own[place - self.first] for place in places]

    def seeds(self, places: Sequence[int]) -> list[int]:
        boot_id = self._peer.boot_id
        return [
            block_seed(boot_id, self._offered[place], self._tags[place - self.first])
            for place in places
        ]

    def known(self, places: Sequence[int]) -> bool:
        """Whether the granter's sums of all these places are here."""
        return self._sums.keys() >= set(places)

    def wrong(self, places: Sequence[int], sums: NDArray[np.uint64]) -> list[int]:
        """Places whose own `sums`, [places, slabs], are not the granter's."""
        return [
            place
            for place, row in zip(places, sums, strict=True)
            if row.tobytes() != self._sums[place]
        ]

    def verified(self, places: Sequence[int]) -> None:
        self._verified.update(places)

    def _check_range(self, places: range) -> None:
        if places.start < self.first or places.stop > self.end:
            raise HandoffError(
                f"the granter speaks of places {places.start} to {places.stop}; "
                f"wanted are {self.first} to {self.end}"
            )

    def _check_partial(self, places: range, tokens: int) -> None:
        alone_and_last = len(places) == 1 and places.stop == self.end > self._full
        if not alone_and_last or not self._fits(tokens) or self._full < places.start:
            raise HandoffError(
                f"the granter offers {tokens} tokens in places {places.start} to {places.stop}: "
                f"no partial last block of {self._tokens} tokens"
            )
        if places.start in self._offered:
            raise HandoffError(f"the granter offers place {places.start} twice")

    def _fits(self, tokens: int) -> bool:
        """Whether the full blocks can hold what `tokens` leaves over, in equal parts."""
        if self._full == 0:
            return tokens == self._tokens
        size, rest = divmod(self._tokens - tokens, self._full)
        return rest == 0 and size > tokens
