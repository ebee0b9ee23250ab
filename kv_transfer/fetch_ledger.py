"""The reader's ledger of the blocks it fetches: offered, summed, verified, by index.

An index is a position in the sequence's block table. Everything a granter says goes through here
and is checked before it is used: ids within its pool, indices within the fetch, nothing twice.
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


class FetchLedger:
    """The indices from `opening.held_blocks` to the end of the prompt, with the own block of each.

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
        self._full = self.first + len(identities)  # indices before this one hold full blocks
        self._tokens = len(opening.tokens)
        self._handoff_id = opening.handoff_id
        self._peer = peer
        self._slabs = slabs
        self._own = list(blocks)
        self._tags = list(identities)
        self._offered: dict[int, int] = {}  # index to the granter's block
        self._sums: dict[int, bytes] = {}  # of each index's slabs
        self._verified: set[int] = set()

    @property
    def complete(self) -> bool:
        return len(self._verified) == len(self._own)

    @property
    def all_offered(self) -> bool:
        return len(self._offered) == len(self._own)

    def offered(self, offer: handoff_pb2.Offer) -> range:
        """Enter an offer and return its indices. Raises HandoffError if it cannot be true."""
        indices = range(offer.first, offer.first + len(offer.blocks))
        if not indices:
            raise HandoffError("the granter made an empty offer")
        self._check_range(indices)
        if offer.partial_tokens:
            self._check_partial(indices, offer.partial_tokens)
            self._tags.append(partial_tag(self._handoff_id, offer.partial_tokens))
        elif indices.stop > self._full:
            raise HandoffError(f"the granter offers index {self._full} as a full block")
        for index, block in zip(indices, offer.blocks, strict=True):
            if block >= self._peer.num_blocks:
                raise HandoffError(
                    f"the granter offers block {block} of a pool of {self._peer.num_blocks}"
                )
            if index in self._offered:
                raise HandoffError(f"the granter offers index {index} twice")
            self._offered[index] = block
        return indices

    def summed(self, sums: handoff_pb2.Checksums) -> None:
        """Enter the checksums of offered blocks. Raises HandoffError for those of others."""
        count, rest = divmod(len(sums.checksums), self._slabs)
        if rest or not count:
            raise HandoffError(f"{len(sums.checksums)} sums are not {self._slabs} for each block")
        indices = range(sums.first, sums.first + count)
        self._check_range(indices)
        packed, width = array("Q", sums.checksums).tobytes(), self._slabs * _SUM_BYTES
        for index, start in zip(indices, range(0, len(packed), width), strict=True):
            if index not in self._offered or index in self._sums:
                raise HandoffError(f"the granter's sums of index {index} are out of order")
            self._sums[index] = packed[start : start + width]

    def remote(self, indices: Sequence[int]) -> list[int]:
        return [self._offered[index] for index in indices]

    def own(self, indices: Sequence[int]) -> list[int]:
        return [self._own[index - self.first] for index in indices]

    def seeds(self, indices: Sequence[int]) -> list[int]:
        boot_id = self._peer.boot_id
        return [
            block_seed(boot_id, self._offered[index], self._tags[index - self.first])
            for index in indices
        ]

    def known(self, indices: Sequence[int]) -> bool:
        """Return whether the granter's checksums of all these indices are here."""
        return self._sums.keys() >= set(indices)

    def wrong(self, indices: Sequence[int], sums: NDArray[np.uint64]) -> list[int]:
        """Return the indices whose own `sums`, [indices, slabs], differ from the granter's."""
        return [
            index
            for index, row in zip(indices, sums, strict=True)
            if row.tobytes() != self._sums[index]
        ]

    def verified(self, indices: Sequence[int]) -> None:
        self._verified.update(indices)

    def _check_range(self, indices: range) -> None:
        if indices.start < self.first or indices.stop > self.end:
            raise HandoffError(
                f"the granter speaks of indices {indices.start} to {indices.stop}; "
                f"wanted are {self.first} to {self.end}"
            )

    def _check_partial(self, indices: range, tokens: int) -> None:
        alone_and_last = len(indices) == 1 and indices.stop == self.end > self._full
        if not alone_and_last or not self._fits(tokens) or self._full < indices.start:
            raise HandoffError(
                f"the granter offers {tokens} tokens in indices {indices.start} to {indices.stop}: "
                f"no partial last block of {self._tokens} tokens"
            )
        if indices.start in self._offered:
            raise HandoffError(f"the granter offers index {indices.start} twice")

    def _fits(self, tokens: int) -> bool:
        """Return whether the full blocks can hold the rest of the tokens in equal parts."""
        if self._full == 0:
            return tokens == self._tokens
        size, rest = divmod(self._tokens - tokens, self._full)
        return rest == 0 and size > tokens
