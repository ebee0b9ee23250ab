"""Uses two pools for long: which blocks of a granter then go into which blocks of a reader.

Prompts of unlike lengths come, half of them as the next turn of a conversation. The granter keeps
a few of them and caches the rest; at the reader they grow block by block, beside each other, until
nine tenths of its pool are held. Both pools are those of the workers
(engine/scheduling/blocks.py), so their order is the allocator's.

    python -m benchmarks.gpu_parts.block_churn          prints how much of it is consecutive
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.scheduling.blocks import BlockPool, Hold

HELD_SHARE = 0.9
PROMPT_BLOCKS = 128  # median, of a new prompt
TURN_BLOCKS = 32  # median, of a further turn
GROWN_BLOCKS = 16  # median, of an answer
KEPT_PROMPTS = 16  # at the granter
CONVERSATIONS = 200

Handed = tuple[list[int], list[int]]  # blocks at the granter, and at the reader


@dataclass(slots=True)
class _Sequence:
    names: list[int]
    blocks: list[int]
    left: int  # blocks until its end


class BlockChurn:
    """Two pools of `total` blocks in use. `hand_over` yields the blocks of one more prompt."""

    def __init__(self, total: int, seed: int = 1) -> None:
        self.granter, self.reader = BlockPool(total, 1), BlockPool(total, 1)
        self._dice = random.Random(seed)
        self._most = max(2, total // 20)  # blocks of a prompt
        self._kept: list[list[int]] = []
        self._growing: list[_Sequence] = []
        self._ended: list[list[int]] = []
        self._names = 0

    def hand_over(self) -> Handed:
        """Compute a prompt at the granter, and read what the reader lacks of it."""
        names = self._prompt()
        while self.reader.total - self.reader.available + len(names) > self._room:
            self._grow()
        while len(self._kept) > KEPT_PROMPTS or self.granter.available < len(names):
            self.granter.release(self._kept.pop(0), Hold.USED)
        theirs, _ = self._held(self.granter, names)
        self._kept.append(theirs)
        ours, known = self._held(self.reader, names)
        self._growing.append(_Sequence(names, ours, self._length(GROWN_BLOCKS)))
        return theirs[known:], ours[known:]

    @property
    def _room(self) -> float:
        return HELD_SHARE * self.reader.total

    def _prompt(self) -> list[int]:
        if self._ended and self._dice.random() < 0.5:
            names = list(self._dice.choice(self._ended))
            if len(names) < self._most:
                return names + self._new(self._length(TURN_BLOCKS))
        return self._new(min(self._most, self._length(PROMPT_BLOCKS)))

    def _length(self, middle: int) -> int:
        """Blocks around `middle`, or around a smaller number in a small pool."""
        middle = min(middle, max(1, self._most // 2))
        return max(2, min(self._most, int(self._dice.lognormvariate(math.log(middle), 0.8))))

    def _new(self, count: int) -> list[int]:
        self._names += count
        return list(range(self._names - count, self._names))

    def _held(self, pool: BlockPool, names: list[int]) -> tuple[list[int], int]:
        """Blocks of all names, and how many of them the pool had; the last one is computed."""
        identities = [name.to_bytes(8, "big") for name in names]
        known = pool.match(identities, names, Hold.USED, len(names) - 1)
        blocks = known + pool.allocate(len(names) - len(known), Hold.USED)
        _publish(pool, blocks[len(known) :], names[len(known) :])
        return blocks, len(known)

    def _grow(self) -> None:
        """Each sequence fills a block now and then; one that is complete ends."""
        for sequence in self._growing:
            if self._dice.random() < 0.25 and self.reader.available:
                fresh, name = self.reader.allocate(1, Hold.USED), self._new(1)
                _publish(self.reader, fresh, name)
                sequence.blocks += fresh
                sequence.names += name
                sequence.left -= 1
        # Where no block is left, the first ends early, as one that is preempted would.
        for index, sequence in reversed(list(enumerate(self._growing))):
            if sequence.left <= 0 or (index == 0 and not self.reader.available):
                self.reader.release(sequence.blocks, Hold.USED)
                self._ended.append(sequence.names)
                del self._growing[index]
        del self._ended[:-CONVERSATIONS]


def _publish(pool: BlockPool, blocks: Sequence[int], names: Sequence[int]) -> None:
    for block, name in zip(blocks, names, strict=True):
        pool.identify(block, name.to_bytes(8, "big"), (name,))


def descriptors(theirs: Sequence[int], ours: Sequence[int]) -> int:
    """How many runs are consecutive at both ends."""
    pairs = list(zip(theirs, ours, strict=True))
    return sum(
        (a + 1, b + 1) != after for (a, b), after in zip(pairs, [*pairs[1:], (-1, -1)], strict=True)
    )


def main() -> None:
    for total in (4096, 24576):
        churn = BlockChurn(total)
        for _ in range(total // 8):
            churn.hand_over()
        later = [churn.hand_over() for _ in range(total // 16)]
        blocks = sum(len(ours) for _, ours in later)
        runs = sum(descriptors(*each) for each in later)
        print(
            f"{total} blocks: {1 - runs / blocks:.3f} follow their neighbour at both ends, "
            f"{blocks / runs:.1f} blocks to a descriptor"
        )


if __name__ == "__main__":
    main()
