"""An `Engine` without a model: its next token is a hash of the exact KV bytes that it reads.

Computing a token writes a record of it into its block; drawing hashes every record of the
sequence, in order, out of the pool, and its history where the sampling asks for one. Any wrong,
stale, missing or misplaced block therefore changes the output, at microseconds a token.
`expected_output` says what a correct run gives. Steps run one after the other, whether somebody
waits for them or not, and write at their end.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from baton.engine.batch import Draw, Drawn, StepBatch, StepResult, fed, forsake, unfinished
from baton.runtime.errors import EngineError, OutOfMemory
from baton.runtime.sampling import SamplingParams

RECORD_BYTES = 8


def block_bytes(block_size: int, slabs: int) -> int:
    return block_size * slabs * RECORD_BYTES


class HashEngine:
    """`pool` is uint8 [blocks, block_bytes]; a step takes `step_s(batch)` of the loop's time."""

    def __init__(
        self,
        pool: NDArray[np.uint8],
        *,
        block_size: int,
        slabs: int,
        vocab_size: int,
        step_s: Callable[[StepBatch], float] = lambda batch: 0.0,
    ) -> None:
        # [blocks, slab, token, record]
        self._pool = pool.reshape(pool.shape[0], slabs, block_size, RECORD_BYTES)
        self._block_size = block_size
        self._slabs = slabs
        self._vocab_size = vocab_size
        self._step_s = step_s
        self.fail_steps = 0  # the next steps that fail, as a device would
        self.break_slices: set[int] = set()  # slices of the next step with numbers not finite
        self.memory_tokens = sys.maxsize  # slices of more do not fit into memory
        self.steps = 0
        self.under_way: list[StepBatch] = []  # submitted and not over
        self._results: deque[asyncio.Future[StepResult]] = deque()  # theirs
        self._last: StepResult | None = None  # of the step before
        self._stalled = False
        self._held_s: float | None = None  # of the step that would be over
        self._idle: asyncio.Future[None] | None = None  # somebody waits for it

    def submit(self, batch: StepBatch) -> HashStep:
        result: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self.under_way.append(batch)
        self._results.append(result)
        if len(self.under_way) == 1:
            self._begin()
        return HashStep(result)

    def stall(self) -> None:
        """From now on no step ends, until `go_on`."""
        self._stalled = True

    def go_on(self) -> None:
        self._stalled = False
        held_s, self._held_s = self._held_s, None
        if held_s is not None:
            self._end(held_s)

    async def close(self) -> None:
        if self.under_way:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    # Plain callbacks and no tasks: a simulation has a hundred steps a second and process.

    def _begin(self) -> None:
        step_s, loop = self._step_s(self.under_way[0]), asyncio.get_running_loop()
        if step_s > 0:
            loop.call_later(step_s, self._end, step_s)
        else:
            loop.call_soon(self._end, step_s)

    def _end(self, step_s: float) -> None:
        if self._stalled:
            self._held_s = step_s
            return
        batch, result = self.under_way[0], self._results.popleft()
        try:
            self._last = self._computed(batch, self._last, step_s)
        except EngineError as error:
            self._last = unfinished(batch)
            if not result.done():  # else nobody waits any more
                result.set_exception(error)
        else:
            if not result.done():
                result.set_result(self._last)
        del self.under_way[0]
        if self.under_way:
            self._begin()
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _computed(self, batch: StepBatch, last: StepResult | None, step_s: float) -> StepResult:
        for source, target in batch.copies:
            self._pool[target] = self._pool[source]
        batch = fed(batch, last)
        self.steps += 1
        if self.fail_steps:
            self.fail_steps -= 1
            raise EngineError("the simulated device failed")
        broken, self.break_slices = frozenset(self.break_slices), set()
        drawn: list[tuple[Drawn, ...]] = []
        failed: dict[int, EngineError] = {}
        for place, piece in enumerate(batch.slices):
            if len(piece.tokens) > self.memory_tokens:
                failed[place] = OutOfMemory("the simulated device has no memory for a slice")
                drawn.append(())
                continue
            self._write(piece.tokens, piece.start, piece.blocks)
            length = piece.start + len(piece.tokens)
            draws = () if place in broken else piece.draws
            drawn.append(tuple(self._draw(draw, piece.blocks, length) for draw in draws))
        return StepResult(
            tuple(drawn), step_s, broken - failed.keys(), failed, shortages=len(failed)
        )

    def _write(self, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> None:
        for position, token in enumerate(tokens, start=start):
            block, place = divmod(position, self._block_size)
            self._pool[blocks[block], :, place] = _records(token, position, self._slabs)

    def _draw(self, draw: Draw, blocks: Sequence[int], length: int) -> Drawn:
        table, width = list(blocks[: -(-length // self._block_size)]), length * RECORD_BYTES
        read = [self._pool[table, slab].tobytes()[:width] for slab in range(self._slabs)]
        return _drawn([_digest(content) for content in read], draw, self._vocab_size)


class HashStep:
    """The handle of one step. Who cancels what `result` gives, gives up the result alone."""

    def __init__(self, result: asyncio.Future[StepResult]) -> None:
        self._result = result

    def result(self) -> asyncio.Future[StepResult]:
        return self._result

    def forsake(self) -> None:
        forsake(self._result)


@lru_cache(maxsize=1 << 16)
def record(token: int, position: int, slab: int) -> bytes:
    """What one slab holds of a token."""
    return hashlib.blake2b(b"%d,%d,%d" % (token, position, slab), digest_size=8).digest()


def expected_output(
    prompt: Sequence[int],
    count: int,
    params: SamplingParams,
    *,
    choice: int,
    slabs: int,
    vocab_size: int,
) -> list[int]:
    """The output tokens of a run in which no block was ever wrong."""
    digests = [
        _digest(b"".join(record(token, place, slab) for place, token in enumerate(prompt)))
        for slab in range(slabs)
    ]
    tokens = list(prompt)
    for _ in range(count):
        history = tokens if params.needs_history else ()
        draw = Draw(choice, len(tokens), params, history, len(prompt))
        token = _drawn(digests, draw, vocab_size).token
        for slab, digest in enumerate(digests):
            digest.update(record(token, len(tokens), slab))
        tokens.append(token)
    return tokens[len(prompt) :]


@lru_cache(maxsize=1 << 16)
def _records(token: int, position: int, slabs: int) -> NDArray[np.uint8]:
    """Of all slabs, [slabs, RECORD_BYTES]."""
    joined = b"".join(record(token, position, slab) for slab in range(slabs))
    return np.frombuffer(joined, dtype=np.uint8).reshape(slabs, RECORD_BYTES)


def _digest(content: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=8)


def _drawn(slabs: Sequence[hashlib.blake2b], draw: Draw, vocab_size: int) -> Drawn:
    """From the digests of what each slab holds of the sequence."""
    digest = _digest(b"".join(slab.digest() for slab in slabs))
    if draw.params.temperature > 0:
        digest.update(b"%d,%d,%d" % (draw.params.seed, draw.choice, draw.position))
    if draw.params.needs_history:
        digest.update(repr((list(draw.history), draw.prompt_tokens)).encode())
    return Drawn(draw.choice, int.from_bytes(digest.digest(), "little") % vocab_size)
