"""The prefill scheduler: reserves blocks for prompts, plans their chunks and offers their blocks.

It is pure except for the events that it adds to each prompt. A prompt is admitted in order of
arrival, and only with blocks for all its tokens. Its cached prefix is offered at once, finished
blocks after each chunk, and the partial last block at the end. Offered blocks are pinned until the
handoff ends.

    waiting ─ admit ─┬────────────────────────────────▶ computing ─▶ complete
                     └▶ reading: its source's blocks ──▶─┘
                     ◀─ if quarantined destinations cannot be replaced

The first of the queue is refused if it does not fit beside a quarantine even in an empty pool: the
quarantine may last, another worker may have room, and the prompts behind it go on.

One step may be planned while another runs; they are committed in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.scheduling.batch import EMPTY_BATCH, DraftWork, Slice, StepBatch, StepResult
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.engine.scheduling.chunks import Chunk, ChunkScheduler
from baton.engine.scheduling.draw_costs import ZERO_COSTS, DrawCosts
from baton.kv_transfer.block_sizes import block_ratio
from baton.kv_transfer.granter import Computed
from baton.prefill_worker.prompts import Prompt
from baton.proto import worker_pb2
from baton.runtime.config import StepConfig
from baton.runtime.errors import (
    BatonError,
    EngineError,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
)
from baton.runtime.grammar.matcher import over_limits
from baton.runtime.wire import extend_scores
from baton.runtime.worker.attention_pairs import causal_pairs


@dataclass(slots=True)
class StepPlan:
    batch: StepBatch
    chunks: list[Chunk[Prompt]]

    def __bool__(self) -> bool:
        return bool(self.batch.slices)


class PrefillScheduler:
    """Owned by the worker's loop."""

    def __init__(
        self,
        pool: BlockPool,
        config: StepConfig,
        on_fresh: Callable[[list[int]], None],
        costs: DrawCosts = ZERO_COSTS,
        source_usable: Callable[[worker_pb2.Candidate], bool] = lambda source: True,
    ) -> None:
        """`on_fresh` is called with blocks that get new content, `source_usable` with the source of
        an admitted prompt: whether that may be asked now."""
        self._pool = pool
        self._source_usable = source_usable
        self._costs = costs
        self._on_fresh = on_fresh
        self._config = config
        self._waiting: deque[Prompt] = deque()
        self._reading: list[Prompt] = []  # admitted; their READs are under way
        self._computing: list[Prompt] = []
        self._chunks: ChunkScheduler[Prompt] = ChunkScheduler(
            config.prefill_tokens, config.chunk_tokens, pool.block_size
        )

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def computing(self) -> int:
        return len(self._computing)

    @property
    def reading(self) -> int:
        return len(self._reading)

    @property
    def queued_tokens(self) -> int:
        """Count the prompt tokens that are still to be computed."""
        size = self._pool.block_size
        waiting = sum(len(p.tokens) for p in self._waiting)
        reading = sum(len(p.tokens) - p.reading_to * size for p in self._reading)
        return waiting + reading + self._chunks.remaining_tokens

    @property
    def queued_pairs(self) -> int:
        """Count the query-key pairs of the attention of `queued_tokens`."""
        size = self._pool.block_size
        waiting = sum(causal_pairs(0, len(p.tokens)) for p in self._waiting)
        reading = sum(causal_pairs(p.reading_to * size, len(p.tokens)) for p in self._reading)
        return waiting + reading + self._chunks.remaining_pairs

    def submit(self, prompt: Prompt) -> None:
        """Queue a prompt. Raises Overloaded if the queue is full, InvalidRequest if the pool
        can never hold it."""
        wanted, targets = self._blocks_for(prompt), self._targets_for(prompt)
        if wanted + targets > self._pool.total:
            converted = f", {targets} more for a reader of another KV dtype," if targets else ""
            raise InvalidRequest(
                f"the prompt needs {wanted} KV blocks{converted} and the prefill pool has "
                f"{self._pool.total}: shorten the prompt",
                field="prompt",
            )
        if len(self._waiting) >= self._config.max_queue:
            raise Overloaded(f"{len(self._waiting)} prompts wait on this worker")
        self._waiting.append(prompt)

    def admit(self) -> list[Prompt]:
        """Give waiting prompts their blocks, oldest first, until one has to wait for those of
        others. One with `reading_to` waits for its READ (`read_ended`); the others are computed."""
        admitted = []
        while self._waiting and self.computing + self.reading < self._config.max_prompts:
            prompt = self._waiting[0]
            if not self._reserve(prompt):
                if self._fits_beside_quarantine(prompt):
                    break
                self._waiting.popleft()
                self._free(prompt)
                self.fail(prompt, Overloaded("too much of the worker's pool is in quarantine"))
                continue
            self._waiting.popleft()
            prompt.offered = max(prompt.offered, min(prompt.held_blocks, prompt.cached))
            self._offer(prompt, prompt.cached)
            if prompt.reading_to:
                self._reading.append(prompt)
            else:
                self._compute(prompt)
            admitted.append(prompt)
        return admitted

    def _compute(self, prompt: Prompt) -> None:
        self._computing.append(prompt)
        masked = prompt.masks is not None
        draws_s = len(prompt.choices) * self._costs.draw_s(prompt.params, masked=masked)
        computed = prompt.cached * self._pool.block_size
        self._chunks.add(prompt, len(prompt.tokens), computed, draws_s, scored=prompt.scored)

    def quarantine(self, prompt: Prompt, blocks: list[int]) -> None:
        """Set destinations of a prompt's READ aside into which it may still write."""
        self._pool.quarantine(blocks)
        lost = set(blocks)
        prompt.blocks = [-1 if block in lost else block for block in prompt.blocks]

    def end_quarantine(self, blocks: list[int]) -> None:
        self._pool.end_quarantine(blocks)

    def read_ended(self, prompt: Prompt, verified: int) -> None:
        """Publish and offer the `verified` leading blocks of a READ, which is over however it
        ended, and compute the rest. A prompt whose quarantined destinations cannot be replaced
        waits again, for what its source holds no more."""
        self._reading.remove(prompt)
        first, end = prompt.cached, prompt.reading_to
        prompt.reading_to, prompt.source = 0, None
        leased = [block for block in prompt.blocks[first:end] if block >= 0]
        self._pool.convert(leased, Hold.LEASED, Hold.USED)
        prompt.private = prompt.imprecise_source and verified > 0
        self._publish(prompt, first, first + verified)
        missing = [index for index, block in enumerate(prompt.blocks) if block < 0]
        if prompt.ended or len(missing) > self._pool.available:
            prompt.blocks = [block for block in prompt.blocks if block >= 0]
            self._free(prompt)
            self._end_reserve(prompt)
            if not prompt.ended:
                if self._waiting:  # only the first of the queue keeps the blocks that match
                    self._free(self._waiting[0])
                self._waiting.appendleft(prompt)
            return
        fresh = self._pool.allocate(len(missing), Hold.USED)
        self._on_fresh(fresh)
        for index, block in zip(missing, fresh, strict=True):
            prompt.blocks[index] = block
        prompt.cached, prompt.read = first + verified, verified
        self._offer(prompt, prompt.cached)
        self._compute(prompt)

    def plan(self, tokens_per_s: float = 0.0) -> StepPlan:
        """Plan one step; empty if there is nothing to compute. `tokens_per_s`: see
        `ChunkScheduler.plan`."""
        chunks = self._chunks.plan(tokens_per_s)
        if not chunks:
            return StepPlan(EMPTY_BATCH, [])
        slices = tuple(
            Slice(
                chunk.key.tokens[chunk.start : chunk.end],
                chunk.start,
                tuple(chunk.key.blocks),
                chunk.key.draws() if chunk.last else (),
                scoring=chunk.key.scoring(chunk.start, chunk.end),
                draft=DraftWork(),
            )
            for chunk in chunks
        )
        for chunk in chunks:
            chunk.key.under_way += 1
        return StepPlan(StepBatch(slices), chunks)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Chunk[Prompt]]:
        """Offer the blocks that the step finished. Returns the chunks that count: not those that
        failed or follow a failed one. A prompt is complete with its last chunk."""
        self._step_over(plan)
        computed = []
        for index, chunk in enumerate(plan.chunks):
            prompt = chunk.key
            if not self._chunks.follows(chunk):
                continue
            if index in result.broken:
                self._pool.unpublish(prompt.blocks)
                self.fail(prompt, EngineError("the model's numbers are not finite"))
            elif (reason := result.failed.get(index)) is not None:
                if not (isinstance(reason, OutOfMemory) and self._chunks.cut(chunk)):
                    self.fail(prompt, reason)
            elif chunk.last and prompt.masks is not None and prompt.masks.error is not None:
                self.fail(prompt, InvalidRequest(over_limits(prompt.masks.error)))
            else:
                self._chunks.commit(chunk)
                computed.append(chunk)
                size = self._pool.block_size
                self._publish(prompt, chunk.start // size, chunk.end // size)
                self._offer(prompt, chunk.end // self._pool.block_size)
                if prompt.scored:
                    extend_scores(prompt.scores, result.scores[index])
                if chunk.last:
                    drawn = result.drawn[index]  # sent while the reader reads the offer
                    prompt.events.put_nowait(prompt.first_tokens(drawn, self._pool.block_size))
                    self._complete(prompt)
        return computed

    def abandon_step(self, plan: StepPlan, error: BatonError) -> None:
        """Fail the prompts of a step that the device failed to compute, and offer none of it."""
        self._step_over(plan)
        for chunk in plan.chunks:
            if chunk.key in self._computing:
                self.fail(chunk.key, error)

    def _step_over(self, plan: StepPlan) -> None:
        """Free prompts that are over and in no other step: this step writes no block any more."""
        for chunk in plan.chunks:
            chunk.key.under_way -= 1
            if chunk.key not in self._computing:
                self._free(chunk.key)

    def fail(self, prompt: Prompt, error: BatonError) -> None:
        """Stop computing and report the error to the reader; the pins stay until the handoff
        ends."""
        self._stop(prompt)
        prompt.events.put_nowait(error)

    def stop(self, error: BatonError) -> None:
        """Fail every prompt that waits or is being computed: no step will follow."""
        for prompt in [*self._waiting, *self._reading, *self._computing]:
            prompt.events.put_nowait(error)
        for prompt in self._waiting:
            self._free(prompt)
        self._waiting.clear()

    def end(self, prompt: Prompt) -> None:
        """Unpin a prompt whose handoff is over, and stop computing it. Its granter unpins
        `targets`: a conversion may still write into them."""
        self._pool.release(prompt.pinned, Hold.PINNED)
        prompt.pinned = []
        self._end_reserve(prompt)
        if prompt in self._waiting:
            self._waiting.remove(prompt)
            self._free(prompt)
        self._stop(prompt)

    def _stop(self, prompt: Prompt) -> None:
        """Compute no more chunks of a prompt."""
        if prompt in self._computing:
            self._computing.remove(prompt)
            self._chunks.remove(prompt)
            self._free(prompt)

    def _free(self, prompt: Prompt) -> None:
        """Release the blocks of a prompt that is over, with the last step that computes on them."""
        if not prompt.under_way:
            self._pool.release(prompt.blocks, Hold.USED)
            prompt.blocks = []

    def _reserve(self, prompt: Prompt) -> bool:
        """Reserve all blocks of a prompt, if there is room. Otherwise it keeps those that match:
        each is matched once, however often the first of the queue is tried."""
        size = self._pool.block_size
        # the last token is computed, and where each has to be scored, all are
        limit = 0 if prompt.scored else (len(prompt.tokens) - 1) // size
        held = len(prompt.blocks)
        prompt.blocks += self._pool.match(
            prompt.identities, prompt.tokens, Hold.USED, limit, first=held
        )
        readable, span = self._readable(prompt, limit)
        if len(prompt.blocks) < readable:  # READ whole blocks of the source
            kept = len(prompt.blocks) - len(prompt.blocks) % span
            self._pool.release(prompt.blocks[kept:], Hold.USED)
            del prompt.blocks[kept:]
        wanted = self._blocks_for(prompt) - len(prompt.blocks)
        targets = self._targets_for(prompt)
        if wanted + targets > self._pool.available:
            return False
        prompt.cached = len(prompt.blocks)
        leased = max(0, readable - prompt.cached)
        fresh = self._pool.lease(leased) + self._pool.allocate(wanted - leased, Hold.USED)
        prompt.reading_to = prompt.cached + leased if leased else 0
        prompt.reserve = self._pool.pin_targets(targets)
        self._on_fresh([*fresh, *prompt.reserve])
        prompt.blocks += fresh
        return True

    def _fits_beside_quarantine(self, prompt: Prompt) -> bool:
        """Return whether a prompt would fit if no other held a block. It keeps targets that it has
        taken, if it was admitted before."""
        usable = self._pool.total - self._pool.quarantined - len(prompt.targets)
        return self._blocks_for(prompt) + self._targets_for(prompt) <= usable

    def _targets_for(self, prompt: Prompt) -> int:
        """Return the blocks that its converted ones need, less those that it has offered."""
        first = max(prompt.offered, prompt.held_blocks)
        return prompt.converted_each * (self._blocks_for(prompt) - first)

    def _take_targets(self, prompt: Prompt, blocks: int) -> tuple[int, ...]:
        """Take the targets of so many blocks, which are about to be offered, from its reserve."""
        taken = prompt.reserve[: blocks * prompt.converted_each]
        del prompt.reserve[: len(taken)]
        prompt.targets += taken
        return tuple(taken)

    def _end_reserve(self, prompt: Prompt) -> None:
        self._pool.unpin(prompt.reserve)
        prompt.reserve = []

    def _readable(self, prompt: Prompt, limit: int) -> tuple[int, int]:
        """Return how many of its first blocks its source holds, as far as the router knows, 0 where
        the source may not be asked now; and how many hold one of the source's: they are whole."""
        source, size = prompt.source, self._pool.block_size
        if source is None or not self._source_usable(source.worker):
            return 0, 1
        ratio = block_ratio(source.worker.block_size or size, size)
        if ratio is None:
            return 0, 1
        readable = min(ratio.own_blocks(source.blocks), limit)
        return readable - readable % ratio.split, ratio.split

    def _blocks_for(self, prompt: Prompt) -> int:
        return -(-len(prompt.tokens) // self._pool.block_size)

    def _publish(self, prompt: Prompt, first: int, end: int) -> None:
        """Identify the blocks of these indices, which are complete, unless they are private."""
        if prompt.private:
            return
        size = self._pool.block_size
        for index in range(first, end):
            tokens = prompt.tokens[index * size : (index + 1) * size]
            name = prompt.identities[index]
            self._pool.identify(prompt.blocks[index], name, tokens, prompt.tenant)

    def _offer(self, prompt: Prompt, full_blocks: int) -> None:
        """Pin and offer the first `full_blocks` blocks, less those that the reader has."""
        first = max(prompt.offered, prompt.held_blocks)
        prompt.offered = max(prompt.offered, full_blocks)
        if full_blocks <= first:
            return
        blocks = prompt.blocks[first:full_blocks]
        self._pin(prompt, blocks)
        names = tuple(prompt.identities[first:full_blocks])
        targets = self._take_targets(prompt, len(blocks))
        prompt.events.put_nowait(Computed(first, tuple(blocks), names, targets=targets))

    def _complete(self, prompt: Prompt) -> None:
        """Offer the partial last block, and release all but the pins: all is computed."""
        size = self._pool.block_size
        if partial := len(prompt.tokens) % size:
            last = prompt.blocks[-1]
            self._pin(prompt, [last])
            index = len(prompt.tokens) // size
            prompt.events.put_nowait(
                Computed(index, (last,), (), partial, self._take_targets(prompt, 1))
            )
        prompt.events.put_nowait(None)
        self._stop(prompt)

    def _pin(self, prompt: Prompt, blocks: list[int]) -> None:
        self._pool.hold(blocks, Hold.PINNED)
        prompt.pinned += blocks
