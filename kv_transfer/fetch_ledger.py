"""The books of a fetch: its blocks by index (offered, checksummed, verified), and its READs and
bytes in flight.

An index is a position in the sequence's block table. The ledger checks every message of a granter
before it is used: ids must be in its pool, indices in the fetch, and nothing may repeat. The window
bounds what is in flight. Both are pure: they read and send nothing. The handoff's reader owns them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.checksum import block_seed, partial_tag
from baton.kv_transfer.mover import PeerPool
from baton.proto import handoff_pb2
from baton.runtime.errors import HandoffError

_CHECKSUM_BYTES = 8


class FetchLedger:
    """The indices from `opening.held_blocks` to the end of the prompt, with the own `cells` of
    each: a block, or where block sizes differ see `peer.ratio`.

    `tags` are the granter's of the full blocks, one fewer than `cells` if the last block is
    partial: their identities, or `converted_tag`s. `slabs` is how many checksums an index has,
    `each` how many of the granter's blocks, which hold `block_size` tokens each. `read_slabs`: the
    indices of those that are read (see `ReadShape.slabs`); empty: all. Raises ValueError if the
    numbers of cells and tags do not match.
    """

    def __init__(
        self,
        opening: handoff_pb2.OpenHandoff,
        cells: Sequence[tuple[int, ...]],
        tags: Sequence[bytes],
        peer: PeerPool,
        *,
        slabs: int,
        block_size: int,
        each: int = 1,
        read_slabs: Sequence[int] = (),
    ) -> None:
        if len(cells) - len(tags) not in (0, 1):
            raise ValueError(f"{len(tags)} tags do not match {len(cells)} blocks")
        self.first = opening.held_blocks
        self.end = self.first + len(cells)
        self._full = self.first + len(tags)  # earlier indices are full blocks
        self._tokens = len(opening.tokens)
        self._partial = self._tokens - self._full * block_size  # tokens of the last block
        self._handoff_id = opening.handoff_id
        self._peer = peer
        self._slabs, self._read_slabs = slabs, list(read_slabs)
        self._own = list(cells)
        self._tags = list(tags)
        self._each = each
        self._offered: dict[int, tuple[int, ...]] = {}  # index to the granter's blocks
        self._checksums: dict[int, bytes] = {}  # of the slabs of each index
        self._checked: set[int] = set()  # verified, as the granter's
        self._verified: set[int] = set()  # and in the own order

    @property
    def complete(self) -> bool:
        return len(self._verified) == len(self._own)

    @property
    def all_offered(self) -> bool:
        return len(self._offered) == len(self._own)

    @property
    def leading(self) -> int:
        """Return how many of the granter's blocks are verified before the first one that is not."""
        index = self.first
        while index in self._verified:
            index += 1
        return index - self.first

    def record_held(self, blocks: int) -> None:
        """End the fetch at index `blocks`: the granter holds no more. Raises HandoffError if that
        is none of its indices, or beside an offer."""
        if self._offered or not self.first <= blocks <= self.end:
            raise HandoffError(
                f"the granter holds {blocks} blocks of a handoff from {self.first} to {self.end}, "
                f"with {len(self._offered)} offered before"
            )
        self.end = blocks
        self._full = min(self._full, blocks)
        del self._own[blocks - self.first :]

    def record_offer(self, offer: handoff_pb2.Offer) -> range:
        """Record an offer and return its indices. Raises HandoffError if it is invalid."""
        count, rest = divmod(len(offer.blocks), self._each)
        if not offer.blocks:
            raise HandoffError("the granter made an empty offer")
        if rest:
            raise HandoffError(
                f"the granter offers {len(offer.blocks)} blocks; each index needs {self._each}"
            )
        indices = range(offer.first, offer.first + count)
        self._check_range(indices)
        if offer.partial_tokens:
            self._check_partial(indices, offer.partial_tokens)
            self._tags.append(partial_tag(self._handoff_id, offer.partial_tokens))
        elif indices.stop > self._full:
            raise HandoffError(f"the granter offers index {self._full} as a full block")
        if (largest := max(offer.blocks)) >= self._peer.num_blocks:
            raise HandoffError(
                f"the granter offers block {largest} of a pool of {self._peer.num_blocks}"
            )
        for index, start in zip(indices, range(0, len(offer.blocks), self._each), strict=True):
            if index in self._offered:
                raise HandoffError(f"the granter offers index {index} twice")
            self._offered[index] = tuple(offer.blocks[start : start + self._each])
        return indices

    def record_checksums(self, message: handoff_pb2.Checksums) -> None:
        """Record checksums of offered blocks. Raises HandoffError for those of other blocks."""
        count, rest = divmod(len(message.checksums), self._slabs)
        if rest or not count:
            raise HandoffError(
                f"{len(message.checksums)} checksums of the granter; each block needs {self._slabs}"
            )
        indices = range(message.first, message.first + count)
        self._check_range(indices)
        packed, slabs = array("Q", message.checksums).tobytes(), self._slabs
        if self._read_slabs:
            given = np.frombuffer(packed, dtype=np.uint64).reshape(count, slabs)
            packed, slabs = given[:, self._read_slabs].tobytes(), len(self._read_slabs)
        width = slabs * _CHECKSUM_BYTES
        for index, start in zip(indices, range(0, len(packed), width), strict=True):
            if index not in self._offered or index in self._checksums:
                raise HandoffError(f"the granter's checksums of index {index} are out of order")
            self._checksums[index] = packed[start : start + width]

    def remote(self, indices: Sequence[int]) -> list[int]:
        """Return the granter's blocks of these indices, one index after another."""
        return [block for index in indices for block in self._offered[index]]

    def own(self, indices: Sequence[int]) -> list[int]:
        """Return the own cells of these indices, one index after another."""
        return [cell for index in indices for cell in self._own[index - self.first]]

    def seeds(self, indices: Sequence[int]) -> list[int]:
        boot_id = self._peer.boot_id
        return [
            block_seed(boot_id, self._offered[index][0], self._tags[index - self.first])
            for index in indices
        ]

    def have_checksums(self, indices: Sequence[int]) -> bool:
        """Return whether the granter's checksums of all these indices have arrived."""
        return self._checksums.keys() >= set(indices)

    def mismatched(self, indices: Sequence[int], own: NDArray[np.uint64]) -> list[int]:
        """Return the indices whose own checksums, [indices, slabs], differ from the granter's."""
        return [
            index
            for index, row in zip(indices, own, strict=True)
            if row.tobytes() != self._checksums[index]
        ]

    def record_checked(self, indices: Sequence[int]) -> list[range]:
        """Record indices whose checksums are right. Returns those that can be put into the own
        order now: each range fills an own block, or all of the fetch that goes into the block."""
        joined, complete = self._peer.ratio.joined, []
        self._checked.update(indices)
        for group in {(index - self.first) // joined for index in indices}:
            first = self.first + group * joined
            span = range(first, min(first + joined, self.end))
            if self._checked.issuperset(span):
                complete.append(span)
        return complete

    def record_verified(self, indices: Iterable[int]) -> None:
        self._verified.update(indices)

    def _check_range(self, indices: range) -> None:
        if indices.start < self.first or indices.stop > self.end:
            raise HandoffError(
                f"the granter names indices {indices.start} to {indices.stop}; the handoff has "
                f"{self.first} to {self.end}"
            )

    def _check_partial(self, indices: range, tokens: int) -> None:
        alone_and_last = len(indices) == 1 and indices.stop == self.end > self._full
        if not alone_and_last or tokens != self._partial or self._full < indices.start:
            raise HandoffError(
                f"the granter offers {tokens} tokens in indices {indices.start} to {indices.stop}: "
                f"no partial last block of {self._tokens} tokens"
            )
        if indices.start in self._offered:
            raise HandoffError(f"the granter offers index {indices.start} twice")


class Window:
    """The READs in flight of one handoff. A READ is admitted if both limits hold. A READ that
    exceeds the byte limit is admitted alone, since it could never start otherwise."""

    def __init__(self, max_reads: int, max_bytes: int) -> None:
        if max_reads < 1 or max_bytes < 1:
            raise ValueError(f"a window of {max_reads} READs and {max_bytes} bytes is empty")
        self._max_reads = max_reads
        self._max_bytes = max_bytes
        self.reads = 0  # in flight
        self.bytes = 0

    def admits(self, size: int) -> bool:
        """Return whether a READ of `size` bytes may start now."""
        if self.reads == 0:
            return True
        return self.reads < self._max_reads and self.bytes + size <= self._max_bytes

    def started(self, size: int) -> None:
        """Count a READ; raises ValueError if the window does not admit it."""
        if not self.admits(size):
            raise ValueError(f"a READ of {size} bytes is outside the window")
        self.reads += 1
        self.bytes += size

    def ended(self, size: int) -> None:
        """Record that a READ of `size` bytes has landed or failed."""
        if self.reads == 0 or size > self.bytes:
            raise ValueError(f"no READ of {size} bytes is in flight")
        self.reads -= 1
        self.bytes -= size
