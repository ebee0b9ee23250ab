"""A prefill worker: the production's scheduler on virtual time.

    step k      ├──────── runs ────────┤
                        planned ahead ─┤ step k + 1 runs ...

The next step is planned before a step ends (plan_time.py): a prompt that is admitted later waits
for the step after it. Nothing else changes a plan, so it is made when the first such prompt comes,
or with the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.planner.timing_model import StepWork, TimingModel
from baton.prefill_worker.prompts import Prompt
from baton.prefill_worker.scheduler import PrefillScheduler, StepPlan
from baton.runtime.config import StepConfig
from baton.runtime.worker.attention_pairs import causal_pairs
from baton.simulation.capacity.plan_time import PlanTime
from baton.simulation.capacity.timeline import EventQueue
from baton.simulation.capacity.use_over_time import UseOverTime


@dataclass(slots=True)
class _Step:
    """A step under way. `plan_s`: the next one is planned then, and `planned` once it is; `ahead`
    is that plan, None if there was nothing to compute."""

    plan: StepPlan
    started_s: float
    tokens: int
    plan_s: float
    planned: bool = False
    ahead: StepPlan | None = None


class PrefillStage:
    """`offered` is called with each prompt that may have new events; `changed` when the load or the
    blocks are others; `read` with each admitted prompt whose source has blocks for it: `read_ended`
    follows."""

    def __init__(
        self,
        worker_id: str,
        timeline: EventQueue,
        timing: TimingModel,
        config: StepConfig,
        pool: BlockPool,
        *,
        offered: Callable[[Prompt], None],
        changed: Callable[[PrefillStage], None],
        read: Callable[[PrefillStage, Prompt], None],
    ) -> None:
        self.worker_id = worker_id
        self.pool = pool
        self.scheduler = PrefillScheduler(
            self.pool,
            config,
            on_fresh=lambda blocks: None,
            source_usable=lambda source: source.worker_id != worker_id,
        )
        self.link_free_s = 0.0  # its last READ ends
        self.use = UseOverTime()
        self.steps = 0
        self.most_held = 0  # blocks
        self.requests = 0
        self.prompt_tokens = 0  # computed
        self._timeline = timeline
        self._timing = timing
        self._offered = offered
        self._changed = changed
        self._read = read
        self._plan_time = PlanTime()
        self._step: _Step | None = None

    @property
    def running(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    @property
    def computing(self) -> int:
        """Count the prompts that are being computed."""
        return self.scheduler.computing

    @property
    def busy_s(self) -> float:
        """Return the seconds of the steps that have ended."""
        return self.use.total_s

    def submit(self, prompt: Prompt) -> None:
        """Queue a prompt. Raises Overloaded or InvalidRequest."""
        self._plan_ahead()
        self.scheduler.submit(prompt)
        self.requests += 1
        self._wake()

    def end(self, prompt: Prompt) -> None:
        """Unpin a prompt whose handoff is over."""
        self._plan_ahead()
        prompt.ended = True
        self.scheduler.end(prompt)
        self._wake()

    def read_ended(self, prompt: Prompt, verified: int) -> None:
        """Compute the rest of a prompt of which so many leading blocks were READ."""
        self._plan_ahead()
        self.scheduler.read_ended(prompt, verified)
        self._offered(prompt)
        self._wake()

    def _wake(self) -> None:
        """Admit prompts, and plan if no step is under way."""
        for prompt in self.scheduler.admit():
            self._offered(prompt)
            if prompt.reading_to:
                self._read(self, prompt)
        self.most_held = max(self.most_held, self.pool.total - self.pool.available)
        self._changed(self)
        if self._step is None and (plan := self.scheduler.plan()):
            self._start(plan)

    def _plan_ahead(self) -> None:
        """Plan the next step if its time has come, before anything changes."""
        step = self._step
        if step is not None and not step.planned and self._timeline.now_s >= step.plan_s:
            step.planned = True
            step.ahead = self.scheduler.plan() or None

    def _start(self, plan: StepPlan) -> None:
        chunks = [(chunk.start, chunk.end) for chunk in plan.chunks]
        tokens = sum(end - start for start, end in chunks)
        work = StepWork(tokens, sum(causal_pairs(start, end) for start, end in chunks))
        now_s = self._timeline.now_s
        due_s = self._plan_time.due_s(now_s, tokens, has_chunks=True)
        self._step = step = _Step(plan, now_s, tokens, due_s)
        self._timeline.at(now_s + self._timing.step_s(work), lambda: self._end(step))

    def _end(self, step: _Step) -> None:
        self._plan_ahead()
        self._step = None
        seconds = self._timeline.now_s - step.started_s
        self._plan_time.record(seconds, step.tokens, has_chunks=True)
        self.use.add(step.started_s, seconds)
        self.steps += 1
        self.prompt_tokens += step.tokens
        drawn = tuple((Drawn(0, 0),) if chunk.last else () for chunk in step.plan.chunks)
        computed = self.scheduler.commit(step.plan, StepResult(drawn))
        if step.ahead is not None:
            self._start(step.ahead)
        for chunk in computed:
            self._offered(chunk.key)
        self._wake()
