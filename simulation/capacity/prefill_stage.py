"""A prefill worker: the production's scheduler on virtual time, one step after the other."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.planner.timing_model import StepWork, TimingModel, causal_pairs
from baton.prefill_worker.prompts import Prompt
from baton.prefill_worker.scheduler import PrefillScheduler, StepPlan
from baton.runtime.config import StepConfig
from baton.simulation.capacity.timeline import EventQueue
from baton.simulation.capacity.use_over_time import UseOverTime


class PrefillStage:
    """`offered` is called with each prompt that may have new events; `changed` when the load or the
    blocks are others."""

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
    ) -> None:
        self.worker_id = worker_id
        self.pool = pool
        self.scheduler = PrefillScheduler(self.pool, config, on_fresh=lambda blocks: None)
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
        self._running = False

    @property
    def running(self) -> bool:
        """Whether a step is under way."""
        return self._running

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
        self.scheduler.submit(prompt)
        self.requests += 1
        self.wake()

    def end(self, prompt: Prompt) -> None:
        """Unpin a prompt whose handoff is over."""
        self.scheduler.end(prompt)
        self.wake()

    def wake(self) -> None:
        """Admit prompts, and plan if no step is under way."""
        for prompt in self.scheduler.admit():
            self._offered(prompt)
        self.most_held = max(self.most_held, self.pool.total - self.pool.available)
        self._changed(self)
        if not self._running and (plan := self.scheduler.plan()):
            self._running = True
            chunks = [(chunk.start, chunk.end) for chunk in plan.chunks]
            work = StepWork(
                sum(end - start for start, end in chunks),
                sum(causal_pairs(start, end) for start, end in chunks),
            )
            seconds = self._timing.step_s(work)
            self._timeline.at(self._timeline.now_s + seconds, lambda: self._end(plan, seconds))

    def _end(self, plan: StepPlan, seconds: float) -> None:
        self._running = False
        self.use.add(self._timeline.now_s - seconds, seconds)
        self.steps += 1
        self.prompt_tokens += sum(chunk.end - chunk.start for chunk in plan.chunks)
        drawn = tuple((Drawn(0, 0),) if chunk.last else () for chunk in plan.chunks)
        for chunk in self.scheduler.commit(plan, StepResult(drawn)):
            self._offered(chunk.key)
        self.wake()
