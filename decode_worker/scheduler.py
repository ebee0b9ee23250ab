"""The decode scheduler: grants credit, fills the batch, and preempts when blocks run out.

Pure but for metrics: no clock, no tensors, no I/O. `admit` grants credit in order of arrival,
`plan` makes one step for the whole batch (decode tokens, then chunks of prompts computed here),
`commit` takes its result. One step may be planned while another runs; they are committed in their
order, and blocks are freed with the last running step that uses them. When blocks run out, the
youngest waiting grant is revoked, then the youngest sequence is preempted; the oldest last.

    submit ─▶ waiting ─ admit ─▶ fetching ── fetched ──▶ running ─▶ ended
                 ▲         └───▶ prefilling ─ last chunk ──▲ │
                 └───────────────── preempted ───────────────┘
"""

from __future__ import annotations

from functools import partial

from baton.decode_worker import credit
from baton.decode_worker.credit_queue import CreditQueue
from baton.decode_worker.kv_reservations import KvReservations
from baton.decode_worker.sequences import Group, Local, Phase, Request, Sequence
from baton.decode_worker.speculator import Speculator
from baton.decode_worker.step_plan import RequestTurns, StepOutcome, StepPlan, VerifiedRun
from baton.engine.scheduling.batch import EMPTY_BATCH, Slice, StepBatch, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.scheduling.chunks import Chunk, ChunkScheduler
from baton.engine.scheduling.draw_costs import ZERO_COSTS, DrawCosts
from baton.engine.scheduling.verification import speculates
from baton.runtime import metrics
from baton.runtime.config import StepConfig
from baton.runtime.errors import OutOfBlocks, OutOfMemory
from baton.runtime.identity import BlockNames, KeyedNames


class DecodeScheduler:
    """Owned by the worker's loop. Groups wait in order of arrival."""

    def __init__(
        self,
        pool: BlockPool,
        config: StepConfig,
        key: bytes,
        costs: DrawCosts = ZERO_COSTS,
        speculator: Speculator | None = None,
        names: BlockNames | None = None,
    ) -> None:
        self._pool = pool
        self._costs = costs
        self._speculator = speculator
        self._config = config
        self._names = names or KeyedNames(key)
        self.reservations = KvReservations(
            pool, self._names, speculator.drafting if speculator else "none"
        )
        self.queue = CreditQueue(pool, config)
        self._granted: list[Group] = []  # fetching or prefilling, oldest first
        self._running: list[Sequence] = []  # oldest first
        self.chunks: ChunkScheduler[Group] = ChunkScheduler(
            config.local_prefill_tokens, config.local_prefill_tokens, pool.block_size
        )
        self._under_way = 0  # steps planned and not committed
        self._verifying = 0  # of these, those that verify proposals
        self._turns = RequestTurns()
        self.preemptions = 0
        self.starved = False  # the last plan found no block while waiting grants hold some

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def running(self) -> int:
        """Sequences that still want tokens."""
        return sum(not sequence.ended for sequence in self._running)

    @property
    def active_requests(self) -> int:
        """Count the requests of which a choice runs or has its credit."""
        running = {sequence.request for sequence in self._running if not sequence.ended}
        return len(running.union(group.request for group in self._granted if group.live))

    @property
    def granted(self) -> list[Group]:
        return self._granted

    @property
    def queued_tokens(self) -> int:
        """Count the prompt tokens that are still to be computed on this worker."""
        return self.queue.local_tokens + self.chunks.remaining_tokens

    @property
    def promised_blocks(self) -> int:
        """Count the blocks of credit that are granted and not yet allocated."""
        return credit.unallocated(self._running, self._granted)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises Overloaded if the queue is full, InvalidRequest if the
        pool can never hold it."""
        self.queue.check_room()
        first = request.sequences[0]
        tokens = first.span(0, first.length)
        local: Local = "placed" if request.local else None
        self.queue.append(self._group(request, list(request.sequences), tokens, local))

    def admit(self) -> list[Group]:
        """Grant credit and reserve blocks, oldest first, until one does not fit.

        A returned group is FETCHING, with leased blocks after its `held` matched ones, or
        PREFILLING here. None is granted while a running sequence waits for a block: a new grant
        would take the blocks of the grant that is taken back for that sequence.
        """
        admitted = []
        beside = self._running, self._granted
        while (group := self.queue.next(*beside)) is not None and not self.starved:
            if not self.queue.has_credit(group, *beside) or not self.reservations.reserve(group):
                break
            group.phase = Phase.FETCHING
            if group.local:
                self._start_prefill(group)
            self.queue.remove_granted(group)
            self._granted.append(group)
            admitted.append(group)
        return admitted

    def to_local(self, group: Group) -> None:
        """Compute the group's prompt here, from its matched blocks: no prefill worker is left."""
        self.reservations.lease_ended(group)
        group.local = "no_candidate"
        self._start_prefill(group)

    def fetched(self, group: Group) -> None:
        """Publish the group's full blocks, all verified now, and let its sequences run."""
        self.reservations.lease_ended(group)
        self.reservations.publish(group, group.held, len(group.tokens))
        self._run(group)

    def requeue(self, group: Group) -> None:
        """Take a waiting grant back: free its blocks and queue it by its arrival."""
        self.reservations.free_group(group)
        self._granted.remove(group)
        if not group.live:
            group.phase = Phase.OVER
            return
        sequences = [sequence for sequence in group.sequences if not sequence.ended]
        waiting = self._group(group.request, sequences, group.tokens, group.local)
        waiting.recomputed_tokens = group.recomputed_tokens
        self.queue.requeue(waiting)

    def blocked_by_quarantine(self, now_s: float) -> list[Group]:
        """Same as `CreditQueue.blocked_by_quarantine`."""
        return self.queue.blocked_by_quarantine(now_s)

    def youngest_fetching(self) -> Group | None:
        fetching = [group for group in self._granted if group.phase is Phase.FETCHING]
        return max(fetching, key=lambda group: group.arrived_s, default=None)

    def plan(self, tokens_per_s: float = 0.0) -> StepPlan:
        """Plan one step, the one after that under way if there is one. It is empty if there is
        nothing to compute, or if a preemption is needed, which waits for the step under way.

        Sequences that find no block make room for older ones first. A sequence whose last token
        a step under way will draw takes no part, nor do the choices of a prompt whose last chunk
        is under way: their blocks are not their own yet. `tokens_per_s`: see `ChunkScheduler.plan`.
        """
        self.starved = False
        if not (self._running or self.chunks) or self._waits_for_step():
            return StepPlan(EMPTY_BATCH, [], [])
        wanting = [sequence for sequence in self._running if sequence.wants_token]
        prompts = [group for group in self._granted if self.chunks.unplanned(group)]
        takes_part = self._turns.next(
            [sequence.request for sequence in wanting] + [group.request for group in prompts]
        )
        decoding, before = [], self.preemptions
        for sequence in wanting:
            preempted = self.preemptions > before and sequence not in self._running
            if preempted or not takes_part(sequence.request):
                continue
            if self._grow(sequence):
                decoding.append(sequence)
            elif self._under_way and not self.starved:
                return StepPlan(EMPTY_BATCH, [], [])
        if self.preemptions > before:
            decoding = [sequence for sequence in decoding if sequence in self._running]
        chunks = self.chunks.plan(tokens_per_s, lambda group: takes_part(group.request))
        slices = self._decode_slices(decoding, beside_chunks=bool(chunks))
        verifies = self._speculator is not None and any(map(speculates, slices))
        looked = self._speculator is not None and self._speculator.looked
        slices += [self._slice(chunk) for chunk in chunks]
        if self.preemptions > before and not slices:  # a lone request preempted itself
            return self.plan(tokens_per_s)
        for index, sequence in enumerate(decoding):
            sequence.batch_index, sequence.under_way = index, sequence.under_way + 1
        for chunk in chunks:
            chunk.key.under_way += 1
        if slices:
            self._turns.take()
            self._under_way += 1
        self._verifying += verifies
        copies = tuple(self.reservations.take_copies(decoding))
        return StepPlan(StepBatch(tuple(slices), copies), decoding, chunks, verifies, looked)

    def _waits_for_step(self) -> bool:
        """Return whether a plan needs the tokens of the step under way: it follows them. A step
        with a chunk verifies nothing: prompts do not wait, and the yield of steps is comparable."""
        if self._speculator is None or not self._under_way:
            return False
        chunk_next = any(map(self.chunks.unplanned, self._granted))
        wanting = [] if chunk_next else [s for s in self._running if s.wants_token]
        return self._verifying > 0 or self._speculator.should_wait(wanting)

    def _decode_slices(self, decoding: list[Sequence], *, beside_chunks: bool) -> list[Slice]:
        if self._speculator is None or self._under_way or beside_chunks:
            return [sequence.next_slice() for sequence in decoding]
        lend = partial(self.reservations.lend, contended=bool(self.queue))
        return self._speculator.slices(decoding, lend)

    def commit(self, plan: StepPlan, result: StepResult, steps: int = 1) -> StepOutcome:
        """Take a step's tokens; free ended sequences that the next step does not compute on. With
        several `steps` of a plan without chunks, the outputs hold the tokens of all before."""
        outcome = StepOutcome()
        self._step_over(plan)
        for index, sequence in enumerate(plan.decoding):
            if sequence.ended:
                continue
            if index in result.broken:
                self._pool.unpublish(sequence.blocks)
                outcome.broken.append(sequence)
            elif index in result.failed:
                outcome.failed.append((sequence, result.failed[index]))
            elif plan.verifies and speculates(plan.batch.slices[index]):
                outcome.runs.append(self._verified(plan, index, result))
            else:
                sequence.advance(steps, plan.batch.slices[index])
                self.reservations.publish_grown(sequence)
                outcome.drawn.append((sequence, result.drawn[index][0]))
        for index, chunk in enumerate(plan.chunks, start=len(plan.decoding)):
            if self.chunks.follows(chunk):
                self._commit_chunk(chunk, index, result, outcome)
        if self._speculator is not None and plan.decoding and not plan.chunks:
            self._speculator.observe_result(plan.batch, result, looked=plan.looked)
        return outcome

    def _verified(self, plan: StepPlan, index: int, result: StepResult) -> VerifiedRun:
        """Commit the tokens that the target drew itself, and free the blocks of the others."""
        assert self._speculator is not None
        sequence, item = plan.decoding[index], plan.batch.slices[index]
        run = self._speculator.judge(
            sequence, item, result.drawn[index], result.proposed.get(index)
        )
        sequence.advance(len(run.drawn), item, drafted=index in result.proposed)
        self.reservations.publish_grown(sequence, run.drawn)
        self.reservations.trim(sequence)
        return run

    def abandon_step(self, plan: StepPlan) -> list[Sequence]:
        """Discard a step that the device failed to compute. Returns its living sequences."""
        self._step_over(plan)
        held = [*plan.decoding, *(s for c in plan.chunks for s in c.key.sequences)]
        return [sequence for sequence in held if not sequence.ended]

    def end(self, sequence: Sequence) -> None:
        """End a sequence. Its blocks are freed now, or with the last step that computes on them;
        those of an open handoff by `requeue`, once the reader is done."""
        sequence.ended = True
        credit.pass_on(sequence)
        if self._speculator is not None:
            self._speculator.end(sequence)
        if not sequence.under_way:
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of an ended sequence."""
        if sequence in self._running:
            self._running.remove(sequence)
        self.reservations.free(sequence)
        self.queue.remove_ended()
        for group in list(self._granted):
            if group.phase is Phase.PREFILLING and not group.live:
                self._drop_group(group)

    def _step_over(self, plan: StepPlan) -> None:
        """Free what ended during this step: it writes no block any more."""
        self._under_way -= 1
        self._verifying -= plan.verifies
        self.reservations.release_copied(plan.batch.copies)
        for sequence in plan.decoding:
            sequence.under_way -= 1
            if sequence.ended and not sequence.under_way:
                self.release(sequence)
        for chunk in plan.chunks:
            group = chunk.key
            group.under_way -= 1
            if not group.live:
                self._drop_group(group)

    def _group(
        self, request: Request, sequences: list[Sequence], tokens: list[int], local: Local
    ) -> Group:
        names = self._names.chain(request.root, tokens, self._pool.block_size)
        group = Group(request, sequences, tokens, names, local)
        credit.promise(group, self._pool.block_size, self._config.expected_growth_tokens)
        return group

    def _start_prefill(self, group: Group) -> None:
        group.phase = Phase.PREFILLING
        each_s = self._costs.draw_s(group.request.sampling, masked=group.masked)
        draws_s, computed = each_s * len(group.undrawn()), group.held * self._pool.block_size
        self.chunks.add(group, len(group.tokens), computed, draws_s, scored=group.scored)
        group.expect_scores()

    def _grow(self, sequence: Sequence) -> bool:
        """Give it a block for its next token, at the cost of younger ones that no step computes."""
        needed = sequence.computed + sequence.under_way
        while needed >= len(sequence.blocks) * self._pool.block_size:
            try:
                self.reservations.grow(sequence)
                self._extend_promise(sequence)
            except OutOfBlocks:
                if self.youngest_fetching() is not None:
                    self.starved = True
                    return False  # the loop takes that grant back
                if self._under_way:
                    return False
                self.preempt_youngest()
                if sequence not in self._running:
                    return False
        return True

    def _extend_promise(self, sequence: Sequence) -> None:
        """Promise more to a sequence that outgrew its credit, so that new grants leave it room."""
        if len(sequence.blocks) - sequence.shared > sequence.promised:
            growth = min(self._config.expected_growth_tokens, sequence.growth_left)
            sequence.promised += credit.blocks_for(growth, self._pool.block_size)

    def preempt_youngest(self) -> None:
        """Take the blocks of the youngest prefilling group or running sequence."""
        groups = [g for g in self._granted if g.phase is Phase.PREFILLING]
        young_group = max(groups, key=lambda g: g.arrived_s, default=None)
        young = max(self._running, key=lambda s: s.request.arrived_s)
        self.preemptions += 1
        if young_group is not None and young_group.arrived_s >= young.request.arrived_s:
            metrics.PREEMPTIONS.labels("prefilling").inc()
            young_group.local = "recompute"
            computed = self.chunks.computed(young_group)
            young_group.recomputed_tokens = max(young_group.recomputed_tokens, computed)
            self.chunks.remove(young_group)
            self.requeue(young_group)
            return
        metrics.PREEMPTIONS.labels("running").inc()
        self._running.remove(young)
        credit.pass_on(young)
        self.reservations.free(young)
        group = self._group(young.request, [young], young.span(0, young.length), "recompute")
        group.recomputed_tokens = len(group.tokens)
        self.queue.requeue(group)

    def _slice(self, chunk: Chunk[Group]) -> Slice:
        group = chunk.key
        draws = tuple(s.draw() for s in group.undrawn()) if chunk.last else ()
        return group.chunk_slice(chunk.start, chunk.end, draws)

    def _commit_chunk(
        self, chunk: Chunk[Group], index: int, result: StepResult, outcome: StepOutcome
    ) -> None:
        group = chunk.key
        if index in result.broken:
            self._pool.unpublish(group.blocks)
            outcome.broken += [s for s in group.sequences if not s.ended]
            return
        if (reason := result.failed.get(index)) is not None:
            if not (isinstance(reason, OutOfMemory) and self.chunks.cut(chunk)):
                outcome.failed += [(s, reason) for s in group.sequences if not s.ended]
            return
        self.chunks.commit(chunk)
        if (scores := result.scores.get(index)) is not None:
            group.take_scores(scores)
        outcome.chunks.append(chunk)
        self.reservations.publish(group, chunk.start // self._pool.block_size, chunk.end)
        if not chunk.last:
            return
        drawn = zip(group.undrawn(), result.drawn[index], strict=True)
        self._run(group)
        outcome.drawn += [(sequence, token) for sequence, token in drawn if not sequence.ended]

    def _run(self, group: Group) -> None:
        """Let the group's living sequences run, in the order of their arrival."""
        self._granted.remove(group)
        group.phase = Phase.RUNNING
        index = sum(other.request.arrived_s <= group.arrived_s for other in self._running)
        self._running[index:index] = self.reservations.fork(group)

    def _drop_group(self, group: Group) -> None:
        """Drop a group that has ended, and free its blocks with the last step that uses them."""
        self.chunks.remove(group)
        if group.under_way:
            return
        if group.phase is Phase.PREFILLING:
            self.reservations.free_group(group)
            self._granted.remove(group)
        group.phase = Phase.OVER
