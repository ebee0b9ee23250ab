"""A decode worker, or a colocated one: the production's scheduler on virtual time.

    plan ─▶ the time of the step, or of all steps until something else happens ─▶ commit

Steps of the same sequences, in which none ends and none needs a block, change nothing but lengths.
They are one *run*: planned once, committed once. A request that arrives or a handoff that ends
shortens the run to the step that is then under way, so each sequence gets the same tokens at the
same times as with a commit for each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Group, Phase, Request, Sequence
from baton.decode_worker.step_plan import StepPlan
from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.planner.timing_model import StepWork, TimingModel, causal_pairs
from baton.runtime.config import StepConfig
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

    def drew(self, sequence: Sequence, steps: int, gap_s: float) -> None:
        """Take the tokens of a run: `steps` of one sequence, `gap_s` apart, the last one now."""
        ...

    def changed(self, stage: DecodeStage) -> None:
        """Note that the worker's load or blocks are others now."""
        ...


@dataclass(slots=True)
class _Run:
    plan: StepPlan
    started_s: float
    context_tokens: int  # of the first step
    steps: int
    seconds: float


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
        self._tokens = 0  # drawn in steps that have ended
        self._stopped: Callable[[], None] | None = None
        self._timeline = timeline
        self._timing = timing
        self._owner = owner
        self._every_token = every_token
        self._run: _Run | None = None

    @property
    def busy_s(self) -> float:
        """Return the seconds of the steps that have ended."""
        return self.use.total_s

    def submit(self, request: Request) -> None:
        """Queue a request. Raises Overloaded or InvalidRequest."""
        self.scheduler.submit(request)
        self.requests += 1
        self._advance(self._admit())

    def progress(self) -> tuple[int, int, float]:
        """Return the steps that have ended, the tokens that they drew, and their seconds."""
        steps, tokens, busy_s = self.steps, self._tokens, self.busy_s
        if self._run is not None and (ended := self._steps_by_now(self._run) - 1):
            steps += ended
            tokens += ended * len(self._run.plan.decoding)
            busy_s += self._run_s(self._run, ended)
        return steps, tokens, busy_s

    def stop(self, stopped: Callable[[], None]) -> None:
        """Plan no more, and call `stopped` once the step under way has ended."""
        self._stopped = stopped
        if self._run is None:
            stopped()
        else:
            self._shorten(self._run)

    def fetched(self, group: Group) -> None:
        """Let a group run whose blocks are all here."""
        self.scheduler.fetched(group)
        self._advance(changed=True)

    def end(self, sequence: Sequence) -> None:
        """End a sequence that has all its tokens."""
        self.ended_requests += 1
        self.ended_output_tokens += len(sequence.output)
        self.scheduler.end(sequence)

    def taken_back(self, group: Group) -> None:
        """Queue a granted group again, or drop it if it has ended."""
        self.scheduler.requeue(group)
        self._advance(self._admit())

    def _advance(self, changed: bool) -> None:
        """Plan if no step is under way. If one is, plan after it where the plan is `changed`."""
        self._owner.changed(self)
        if self._run is None:
            self._begin()
        elif changed and self._run.steps > 1:
            self._shorten(self._run)

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
        self._admit()
        return plan if plan else self.scheduler.plan()

    def _begin(self) -> None:
        if self._stopped is not None:
            return
        plan = self._plan()
        self.most_held = max(self.most_held, self.pool.total - self.pool.available)
        if not plan:
            return
        context = sum(sequence.computed + 1 for sequence in plan.decoding)
        steps = 1 if plan.chunks or self._every_token else _most_steps(plan, self.pool.block_size)
        run = _Run(plan, self._timeline.now_s, context, steps, 0.0)
        self._run = run
        self._schedule(run, steps)

    def _schedule(self, run: _Run, steps: int) -> None:
        run.steps, run.seconds = steps, self._run_s(run, steps)
        end_s = run.started_s + run.seconds
        self._timeline.at(end_s, lambda: self._end(run, steps))

    def _run_s(self, run: _Run, steps: int) -> float:
        rows = len(run.plan.decoding)
        if not run.plan.chunks:
            return self._timing.decode_run_s(rows, run.context_tokens, steps)
        return self._timing.step_s(
            StepWork(
                sum(chunk.end - chunk.start for chunk in run.plan.chunks),
                sum(causal_pairs(chunk.start, chunk.end) for chunk in run.plan.chunks),
                rows,
                run.context_tokens,
            )
        )

    def _shorten(self, run: _Run) -> None:
        """End the run with the step that is under way now."""
        if (steps := self._steps_by_now(run)) < run.steps:
            self._schedule(run, steps)

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

    def _end(self, run: _Run, steps: int) -> None:
        if run is not self._run or run.steps != steps:
            return  # the run was shortened since
        self._run = None
        self.use.add(run.started_s, run.seconds)
        self.steps += steps
        self._tokens += steps * len(run.plan.decoding)
        self.prompt_tokens += sum(chunk.end - chunk.start for chunk in run.plan.chunks)
        gap_s = 0.0
        if steps > 1:
            gap_s = (run.seconds - self._run_s(run, 1)) / (steps - 1)
            for sequence in run.plan.decoding:
                sequence.output.extend([_token(sequence)] * (steps - 1))
        result = StepResult(_drawn(run.plan))
        drawn = self.scheduler.commit(run.plan, result, steps).drawn
        for sequence, token in drawn:
            sequence.output.append(token.token)
            self._owner.drew(sequence, steps, gap_s)
        for sequence, _ in drawn:
            if not sequence.growth_left:
                self.end(sequence)
        self._owner.changed(self)
        if self._stopped is not None:
            self._stopped()
        self._begin()


def _most_steps(plan: StepPlan, block_size: int) -> int:
    """Return the steps until a sequence of the plan ends or needs a block."""
    return min(
        [
            min(each.growth_left, len(each.blocks) * block_size - each.computed)
            for each in plan.decoding
        ]
    )


def _token(sequence: Sequence) -> int:
    return int(sequence.request.request_id)


def _drawn(plan: StepPlan) -> tuple[tuple[Drawn, ...], ...]:
    rows: list[tuple[Drawn, ...]] = [(Drawn(0, _token(each)),) for each in plan.decoding]
    for chunk in plan.chunks:
        undrawn = chunk.key.undrawn() if chunk.last else []
        rows.append(tuple(Drawn(0, _token(sequence)) for sequence in undrawn))
    return tuple(rows)
