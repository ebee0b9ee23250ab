"""The KV blocks of groups and sequences: reserve, lease, quarantine, publish, fork, free.

Pure bookkeeping on the pool; decides nothing. A group holds its matched prefix as USED and the
rest as LEASED while its handoff is open, then everything as USED; its sequences take over.
"""

from __future__ import annotations

import math

from baton.decode_worker.credit import blocks_for
from baton.decode_worker.draft_progress import Drafting, DraftProgress
from baton.decode_worker.sequences import Group, Phase, Sequence
from baton.engine.scheduling.batch import Drawn
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.runtime.identity import BlockNames


class KvReservations:
    """Owned by the decode scheduler."""

    def __init__(self, pool: BlockPool, names: BlockNames, drafting: Drafting = "none") -> None:
        """`drafting`: whose KV blocks hold beside the target's."""
        self._pool = pool
        self._drafting = drafting
        self._names = names
        self._copies: dict[Sequence, tuple[int, int]] = {}  # still to be made; sources are held

    def reserve(self, group: Group) -> bool:
        """Match and allocate the blocks of the group's tokens, or change nothing. Each sibling
        gets a spare block where the prompt ends within a block. Where a candidate has larger
        blocks, what is not matched is whole ones of these, until `lease_ended`."""
        size, span = self._pool.block_size, self._span(group)
        # the last token is computed, and where each has to be scored, all are
        limit = 0 if group.scored else (len(group.tokens) - 1) // size
        limit -= limit % span
        matched = self._pool.match(group.identities, group.tokens, Hold.USED, limit)
        if beyond := len(matched) % span:
            self._pool.release(matched[-beyond:], Hold.USED)
            del matched[-beyond:]
        wanted = blocks_for(len(group.tokens), size * span) * span - len(matched)
        siblings = len(group.sequences) - 1 if len(group.tokens) % size else 0
        if wanted + siblings > self._pool.available:
            self._pool.release(matched, Hold.USED)
            return False
        fresh = self._pool.allocate(wanted, Hold.USED if group.local else Hold.LEASED)
        group.spares = self._pool.allocate(siblings, Hold.USED)
        group.blocks = matched + fresh
        group.held = len(matched)
        return True

    def lease_ended(self, group: Group) -> None:
        """Turn the leased blocks of a handoff that is over into the group's own, and release those
        behind its tokens."""
        self._pool.convert(group.blocks[group.held :], Hold.LEASED, Hold.USED)
        kept = blocks_for(len(group.tokens), self._pool.block_size)
        self._pool.release(group.blocks[kept:], Hold.USED)
        del group.blocks[kept:]

    def _span(self, group: Group) -> int:
        """Return how many own blocks a block of each candidate holds, the least common number; 1
        where the pool could not hold the prompt in whole ones beside the quarantine, which may
        last: without a handoff the prompt is computed here, and blocks no other."""
        size = self._pool.block_size
        sizes = [] if group.local else [one.block_size for one in group.request.candidates]
        span = math.lcm(1, *(other // size for other in sizes if other and other % size == 0))
        most = blocks_for(len(group.tokens), size * span) * span + len(group.sequences)
        return span if most <= self._pool.total - self._pool.quarantined else 1

    def replace_leased(self, group: Group) -> None:
        """Lease new destinations for those that went into quarantine. Raises OutOfBlocks and
        changes nothing if there are none."""
        missing = [index for index, block in enumerate(group.blocks) if block < 0]
        fresh = self._pool.allocate(len(missing), Hold.LEASED)
        for index, block in zip(missing, fresh, strict=True):
            group.blocks[index] = block

    def quarantine(self, group: Group, blocks: list[int]) -> None:
        """Set leased blocks aside into which an abandoned READ may still write."""
        self._pool.convert(blocks, Hold.LEASED, Hold.QUARANTINED)
        lost = set(blocks)
        group.blocks = [-1 if block in lost else block for block in group.blocks]

    def free_group(self, group: Group) -> None:
        """Release all blocks that a group holds before its sequences run."""
        rest = Hold.LEASED if group.phase is Phase.FETCHING else Hold.USED
        self._pool.release(group.blocks[: group.held], Hold.USED)
        leased = [block for block in group.blocks[group.held :] if block >= 0]
        self._pool.release(leased, rest)
        self._pool.release(group.spares, Hold.USED)
        group.blocks, group.spares = [], []

    def free(self, sequence: Sequence) -> None:
        copy = self._copies.pop(sequence, None)
        if copy is not None:
            self._pool.release(copy[:1], Hold.USED)
        self._pool.release(sequence.blocks, Hold.USED)
        sequence.blocks, sequence.identities, sequence.computed = [], [], 0
        sequence.private = False

    def fork(self, group: Group) -> list[Sequence]:
        """Hand the group's blocks to its living sequences: full blocks are shared, a partial
        last block is copied for each sibling before its next step, and held until then."""
        full = len(group.tokens) // self._pool.block_size
        living = [sequence for sequence in group.sequences if not sequence.ended]
        if not living:
            self._pool.release(group.blocks, Hold.USED)
        for rank, sequence in enumerate(living):
            sequence.blocks = list(group.blocks)
            if rank > 0:
                self._pool.hold(group.blocks[:full], Hold.USED)
                for source in group.blocks[full:]:
                    self._pool.hold([source], Hold.USED)
                    sequence.blocks[full:] = [group.spares.pop()]
                    self._copies[sequence] = (source, sequence.blocks[full])
            sequence.identities, sequence.private = list(group.identities), group.private
            sequence.computed = len(group.tokens)
            if self._drafting != "none":
                keeps = self._drafting == "draft"
                sequence.draft_kv = DraftProgress.at(sequence.computed, keeps_proposals=keeps)
        self._pool.release(group.spares, Hold.USED)
        group.blocks, group.spares = [], []
        return living

    def take_copies(self, decoding: list[Sequence]) -> list[tuple[int, int]]:
        """Return the blocks to copy (source, target) with a step of these sequences. A copy is
        made with a step of its own sequence: later, or after the sequence was freed, it would
        write into a block that belongs to another. `release_copied` when the step is over."""
        return [self._copies.pop(s) for s in decoding if s in self._copies]

    def release_copied(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Release the sources of copies whose step is over."""
        self._pool.release([source for source, _ in copies], Hold.USED)

    def grow(self, sequence: Sequence) -> None:
        """Add one block. Raises OutOfBlocks."""
        sequence.blocks += self._pool.allocate(1, Hold.USED)

    def publish(self, group: Group, first: int, tokens: int) -> None:
        """Identify the group's full blocks from index `first` on, up to this many tokens, unless
        they are private."""
        if group.private:
            return
        size = self._pool.block_size
        for index in range(first, tokens // size):
            content = group.tokens[index * size : (index + 1) * size]
            name, tenant = group.identities[index], group.request.tenant
            self._pool.identify(group.blocks[index], name, content, tenant)

    def lend(self, sequence: Sequence, proposals: int, *, contended: bool) -> int:
        """Add blocks for tokens after the next one, as far as there are some; return how many of
        these the blocks cover. `contended`: another waits for blocks, so that none is taken beyond
        the sequence's own credit. `trim` frees what the step did not need."""
        size = self._pool.block_size
        missing = blocks_for(sequence.computed + 1 + proposals, size) - len(sequence.blocks)
        spare = self._pool.available
        if contended:
            spare = min(spare, sequence.promised - (len(sequence.blocks) - sequence.shared))
        if (fresh := min(missing, spare)) > 0:
            sequence.blocks += self._pool.allocate(fresh, Hold.USED)
        return min(proposals, len(sequence.blocks) * size - sequence.computed - 1)

    def trim(self, sequence: Sequence) -> None:
        """Free the blocks behind its computed tokens, which held rejected proposals."""
        kept = blocks_for(sequence.computed, self._pool.block_size)
        self._pool.release(sequence.blocks[kept:], Hold.USED)
        del sequence.blocks[kept:]

    def publish_grown(self, sequence: Sequence, drawn: tuple[Drawn, ...] = ()) -> None:
        """Publish the blocks that the tokens just computed filled, in all layer groups. `drawn`:
        those among them that are not in its output yet."""
        if sequence.private:
            return
        size, shareable = self._pool.block_size, sequence.shareable
        while (end := (len(sequence.identities) + 1) * size) <= shareable:
            tokens = sequence.length
            content = sequence.span(end - size, min(end, tokens))
            first, last = max(0, end - size - tokens), max(0, end - tokens)
            content += [each.token for each in drawn[first:last]]
            parent = sequence.identities[-1] if sequence.identities else sequence.request.root
            name = self._names.child(parent, content)
            block = sequence.blocks[len(sequence.identities)]
            sequence.identities.append(name)
            self._pool.identify(block, name, content, sequence.request.tenant)
