"""A decode worker, or a colocated one: the production's scheduler on virtual time.

    plan ─▶ the time of the step, or of all steps until something else happens ─▶ commit

Steps of the same sequences, in which none ends and none needs a block, change nothing but lengths.
They are one *run*: planned once, committed once. Before a sequence or a prompt joins, the run is
split: the steps that have ended are committed, and the one under way is a run of its own. So each
sequence gets the same tokens at the same times as with a commit for each step.

A step is planned before the one that runs ends (plan_time.py): what comes later joins the step
after it, and so does a sequence whose prompt that step completes. Such a plan is made when the
first of these happens: until then nothing changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Group, Phase, Request, Sequence
from baton.decode_worker.step_plan import StepPlan
from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.planner.step_samples import StepSample
from baton.planner.timing_model import StepWork, TimingModel
from baton.runtime.config import StepConfig
from baton.runtime.worker.attention_pairs import causal_pairs
from baton.simulation.capacity.plan_time import PlanTime
from baton.simulation.capacity.timeline import EventQueue
from baton.simulation.capacity.trace_tokens import TraceNames
from baton.simulation.capacity.use_over_time import UseOverTime


class DecodeOwner(Protocol):
    """The fleet, as a decode worker sees it."""

    def granted(self, stage: DecodeStage, group: Group) -> None:
        """Open a handoff for a group that got credit, unless its prompt is computed here."""
        ...

    def cancel(self, group: Group) -> None:
        """Close the handoff of a group; the scheduler's `requeue` follows."""
        ...

    def drew(self, sequence: Sequence, steps: int, gap_s: float, last_s: float) -> None:
        """Take the tokens of a run: `steps` of one sequence, `gap_s` apart, the last one at
        `last_s`."""
        ...

    def changed(self, stage: DecodeStage) -> None:
        """Note that the worker's load or blocks are others now."""
        ...


@dataclass(slots=True)
class _Run:
    """`plan_s`: the step after this single one is planned then, and `planned` once it is; `ahead`
    is that plan, None if there was nothing to compute."""

    plan: StepPlan
    started_s: float
    context_tokens: int  # of the first step
    steps: int
    plan_s: float
    planned: bool = False
    ahead: StepPlan | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.plan.chunks)


class DecodeStage:
    """`every_token`: commit each step on its own."""

    def __init__(
        self,
        worker_id: str,
        timeline: EventQueue,
        timing: TimingModel,
        config: StepConfig,
        pool: BlockPool,
        owner: DecodeOwner,
        *,
        every_token: bool = False,
    ) -> None:
        self.worker_id = worker_id
        self.pool = pool
        self.scheduler = DecodeScheduler(self.pool, config, b"", names=TraceNames())
        self.link_free_s = 0.0  # its last READ ends
        self.use = UseOverTime()
        self.steps = 0
        self.most_held = 0  # blocks
        self.requests = 0
        self.ended_requests = 0
        self.ended_output_tokens = 0
        self.prompt_tokens = 0  # computed here
        self.last_decode: StepSample | None = None  # the last step that only decoded
        self._tokens = 0  # drawn in steps that have ended
        self._stopped: Callable[[], None] | None = None
        self._timeline = timeline
        self._timing = timing
        self._owner = owner
        self._every_token = every_token
        self._plan_time = PlanTime()
        self._joins_later = False  # a prompt was admitted after the last plan
        self._run: _Run | None = None

    @property
    def busy_s(self) -> float:
        """Return the seconds of the steps that have ended."""
        return self.use.total_s

    def submit(self, request: Request) -> None:
        """Queue a request. Raises Overloaded or InvalidRequest."""
        if request.local or self.scheduler.waiting:  # one that waits may be computed here
            self._before_change()
        self.scheduler.submit(request)
        self.requests += 1
        self._admit()
        self._advance()

    def progress(self) -> tuple[int, int, float]:
        """Return the steps that have ended, the tokens that they drew, and their seconds."""
        steps, tokens, busy_s = self.steps, self._tokens, self.busy_s
        if self._run is not None and (ended := self._steps_by_now(self._run) - 1):
            steps += ended
            tokens += ended * len(self._run.plan.decoding)
            busy_s += self._run_s(self._run, ended)
        return steps, tokens, busy_s

    def stop(self, stopped: Callable[[], None]) -> None:
        """Plan no more, and call `stopped` once what is planned has ended."""
        self._stopped = stopped
        if self._run is None:
            stopped()
        else:
            self._before_change()

    def fetched(self, group: Group) -> None:
        """Let a group run whose blocks are all here."""
        self._before_change()
        self.scheduler.fetched(group)
        self._advance()

    def end(self, sequence: Sequence) -> None:
        """End a sequence that has all its tokens."""
        self.ended_requests += 1
        self.ended_output_tokens += len(sequence.output)
        self.scheduler.end(sequence)

    def taken_back(self, group: Group) -> None:
        """Queue a granted group again, or drop it if it has ended."""
        self._before_change()
        self.scheduler.requeue(group)
        self._admit()
        self._advance()

    def _advance(self) -> None:
        """Plan if no step is under way."""
        self._owner.changed(self)
        if self._run is None:
            self._begin()

    def _before_change(self) -> None:
        """Split the run under way before a sequence or a prompt joins, and plan the step after it
        if the time of that has come."""
        if self._run is not None and self._run.steps > 1:
            self._split(self._run)
        if (run := self._run) is not None and self._timeline.now_s >= run.plan_s:
            self._plan_ahead(run)

    def _plan_ahead(self, run: _Run) -> None:
        if not run.planned and self._stopped is None:
            run.planned = True
            run.ahead = self._plan() or None

    def _admit(self) -> bool:
        """Grant credit; return whether a prompt is now computed here."""
        local = False
        for group in self.scheduler.admit():
            self._owner.granted(self, group)
            local |= group.phase is Phase.PREFILLING
        return local

    def _plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        while self.scheduler.starved and (group := self.scheduler.youngest_fetching()) is not None:
            self._owner.cancel(group)
            self.scheduler.requeue(group)
            if plan:
                break
            plan = self.scheduler.plan()
        self._joins_later = self._admit()
        return plan if plan else self.scheduler.plan()

    def _begin(self) -> None:
        if self._stopped is None and (plan := self._plan()):
            waits = self._joins_later or len(plan.decoding) < self.scheduler.running
            self._start(plan, alone=self._every_token or waits)

    def _start(self, plan: StepPlan, *, alone: bool) -> None:
        """Begin a step, or all steps that have the same plan unless it is `alone`: a prompt or a
        sequence that waits for a block may join the next one."""
        self.most_held = max(self.most_held, self.pool.total - self.pool.available)
        steps = 1 if plan.chunks or alone else _most_steps(plan, self.pool.block_size)
        self._run_from(plan, self._timeline.now_s, steps)

    def _run_from(self, plan: StepPlan, started_s: float, steps: int) -> None:
        context = sum(sequence.computed + 1 for sequence in plan.decoding)
        run = self._run = _Run(plan, started_s, context, steps, 0.0)
        tokens = run.prompt_tokens + len(plan.decoding)
        run.plan_s = self._plan_time.due_s(started_s, tokens, has_chunks=bool(plan.chunks))
        end_s = started_s + self._run_s(run, steps)
        self._timeline.at(end_s, lambda: self._end(run))

    def _run_s(self, run: _Run, steps: int) -> float:
        rows = len(run.plan.decoding)
        if not run.plan.chunks:
            return self._timing.decode_run_s(rows, run.context_tokens, steps)
        pairs = sum(causal_pairs(chunk.start, chunk.end) for chunk in run.plan.chunks)
        return self._timing.step_s(StepWork(run.prompt_tokens, pairs, rows, run.context_tokens))

    def _step_s(self, rows: int, context_tokens: int) -> float:
        """Return the seconds of a step that only decodes."""
        return self._timing.decode_run_s(rows, context_tokens, 1)

    def _split(self, run: _Run) -> None:
        """Commit the steps of a run that have ended, and let the one under way end alone."""
        ended = self._steps_by_now(run) - 1
        if ended:
            self._commit(run, ended)
            started_s, plan = run.started_s + self._run_s(run, ended), self.scheduler.plan()
        else:
            started_s, plan = run.started_s, run.plan
        assert len(plan.decoding) == len(run.plan.decoding) and not plan.chunks
        self._run_from(plan, started_s, 1)

    def _steps_by_now(self, run: _Run) -> int:
        """Return how many steps of the run have begun."""
        passed_s = self._timeline.now_s - run.started_s
        low, high = 1, run.steps
        while low < high:
            middle = (low + high) // 2
            if self._run_s(run, middle) >= passed_s:
                high = middle
            else:
                low = middle + 1
        return low

    def _end(self, run: _Run) -> None:
        if run is not self._run:
            return  # the run was split since
        if run.plan.chunks and self._timeline.now_s >= run.plan_s:
            self._plan_ahead(run)
        self._run = None
        for sequence in self._commit(run, run.steps):
            if not sequence.growth_left:
                self.end(sequence)
        self._owner.changed(self)
        if run.ahead is not None:
            self._admit()
            self._start(run.ahead, alone=True)
        else:
            if self._stopped is not None:
                self._stopped()
            self._begin()

    def _commit(self, run: _Run, steps: int) -> list[Sequence]:
        """Commit the first steps of a run; return the sequences that drew a token."""
        seconds, chunks, rows = self._run_s(run, steps), run.plan.chunks, len(run.plan.decoding)
        self.use.add(run.started_s, seconds)
        self.steps += steps
        self._tokens += steps * rows
        self.prompt_tokens += run.prompt_tokens
        first_s = seconds if steps == 1 else self._step_s(rows, run.context_tokens)
        gap_s = (seconds - first_s) / (steps - 1) if steps > 1 else 0.0
        for ended in range(max(0, steps - 2), steps):  # the last two
            alone_s = (
                first_s if not ended else self._step_s(rows, run.context_tokens + rows * ended)
            )
            self._plan_time.record(alone_s, run.prompt_tokens + rows, has_chunks=bool(chunks))
        if not chunks:
            context = run.context_tokens + rows * (steps - 1)
            self.last_decode = StepSample(StepWork(0, 0, rows, context), alone_s)
        if steps > 1:
            for sequence in run.plan.decoding:
                sequence.output.extend([_drawn_of(sequence)[0].token] * (steps - 1))
        drawn = self.scheduler.commit(run.plan, StepResult(_drawn(run.plan)), steps).drawn
        for sequence, token in drawn:
            sequence.output.append(token.token)
            self._owner.drew(sequence, steps, gap_s, run.started_s + seconds)
        return [sequence for sequence, _ in drawn]


def _most_steps(plan: StepPlan, block_size: int) -> int:
    """Return the steps until a sequence of the plan ends or needs a block."""
    return min(
        [
            min(each.growth_left, len(each.blocks) * block_size - each.computed)
            for each in plan.decoding
        ]
    )


def _drawn_of(sequence: Sequence) -> tuple[Drawn]:
    return _drawn_by(sequence.request.request_id)


@lru_cache(maxsize=1 << 14)  # requests at a time; each draws the same token in every step
def _drawn_by(request_id: str) -> tuple[Drawn]:
    return (Drawn(0, int(request_id)),)


def _drawn(plan: StepPlan) -> tuple[tuple[Drawn, ...], ...]:
    rows: list[tuple[Drawn, ...]] = [_drawn_of(each) for each in plan.decoding]
    for chunk in plan.chunks:
        undrawn = chunk.key.undrawn() if chunk.last else []
        rows.append(tuple(_drawn_of(sequence)[0] for sequence in undrawn))
    return tuple(rows)
