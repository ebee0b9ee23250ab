"""Workers with scripted counters, and a role controller that watches them."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.planner.change_history import RoleStep
from baton.planner.controller import Decision, RoleController
from baton.planner.controller_forecast import ServiceGoals
from baton.planner.controller_load import (
    FleetSample,
    StepSpeed,
    WorkerRole,
    WorkerSample,
    WorkerState,
)

GOALS = ServiceGoals(ttft_s=2.0, itl_s=0.030, max_sequences=64)
PREFILL_RATE = 10_000.0  # tokens a second of a worker
SPEED = StepSpeed(0.010, 0.001, 0.0)
OUTPUT = 100
CONTEXT = 1000


@dataclass
class ScriptedFleet:
    """Workers whose counters rise as fluids would: queues, batches and steps."""

    roles: dict[str, WorkerRole]
    rate: float = 4.0  # requests a second
    tokens: float = 1000.0  # of a prompt
    now_s: float = 100.0
    queue: float = 0.0
    running: float = 0.0
    batch: float = 0.0  # sequences of the last steps, of all workers
    states: dict[str, WorkerState] = field(default_factory=dict)
    boots: dict[str, int] = field(default_factory=dict)
    counters: dict[str, dict[str, float]] = field(default_factory=dict)

    def of(self, role: WorkerRole) -> list[str]:
        return [name for name, each in self.roles.items() if each == role]

    def tick(self, seconds: float = 1.0) -> FleetSample:
        """Let time pass, and return the reports."""
        prefill, decode = self.of("prefill"), self.of("decode")
        arrived = self.rate * seconds
        self.queue += arrived * self.tokens
        computed = min(self.queue, PREFILL_RATE * seconds * len(prefill))
        self.queue -= computed
        self.running += computed / self.tokens if self.tokens else arrived
        self.batch = self.running
        batch = self.batch / max(1, len(decode))
        step_s = SPEED.fixed_s + SPEED.per_sequence_s * batch
        steps = seconds / step_s if batch else 0.0
        drawn = min(self.running * OUTPUT, steps * self.running) if decode else 0.0
        self.running -= drawn / OUTPUT
        for name in prefill:
            self._count(name, prompt_tokens=computed / len(prefill),
                        busy_s=computed / len(prefill) / PREFILL_RATE)  # fmt: skip
        for name in decode:
            self._count(name, requests=arrived / len(decode), steps=steps,
                        output_tokens=steps * batch, busy_s=steps * step_s,
                        ended_requests=drawn / OUTPUT / len(decode),
                        ended_output_tokens=drawn / len(decode))  # fmt: skip
        self.now_s += seconds
        return self.sample()

    def sample(self) -> FleetSample:
        return FleetSample(self.now_s, tuple(self._report(name) for name in self.roles))

    def change(self, step: RoleStep) -> None:
        """Complete a change at once: another boot, whose counters begin at zero."""
        self.roles[step.worker_id] = step.role
        self.boots[step.worker_id] = self.boots.get(step.worker_id, 0) + 1
        self.counters.pop(step.worker_id, None)

    def _count(self, name: str, **more: float) -> None:
        counters = self.counters.setdefault(name, {})
        for each, value in more.items():
            counters[each] = counters.get(each, 0.0) + value

    def _report(self, name: str) -> WorkerSample:
        role, found = self.roles[name], self.counters.get(name, {})
        prefill = role == "prefill"
        count = len(self.of(role))
        return WorkerSample(
            name,
            f"{name}.{self.boots.get(name, 0)}",
            role,
            self.states.get(name, "ready"),
            running=0 if prefill else round(self.batch / count),
            queued_tokens=round(self.queue / count) if prefill else 0,
            kv_used_tokens=0 if prefill else round(self.batch / count * CONTEXT),
            kv_tokens=1_000_000,
            requests=round(found.get("requests", 0)),
            ended_requests=round(found.get("ended_requests", 0)),
            ended_output_tokens=round(found.get("ended_output_tokens", 0)),
            prompt_tokens=round(found.get("prompt_tokens", 0)),
            output_tokens=round(found.get("output_tokens", 0)),
            busy_s=found.get("busy_s", 0.0),
            steps=round(found.get("steps", 0)),
        )


def fleet(prefill: int, decode: int, *, rate: float = 4.0, tokens: float = 1000.0) -> ScriptedFleet:
    """Return a fleet of p0, p1, .. and d0, d1, .. that gets `rate` requests a second."""
    roles: dict[str, WorkerRole] = {f"p{n}": "prefill" for n in range(prefill)}
    roles |= {f"d{n}": "decode" for n in range(decode)}
    return ScriptedFleet(roles, rate=rate, tokens=tokens)


def run(
    controller: RoleController, scripted: ScriptedFleet, seconds: int, *, acts: bool = True
) -> list[Decision]:
    """Decide every second; steps are accepted, and changes complete at once."""
    found = []
    for _ in range(seconds):
        sample = scripted.tick()
        found.append(controller.decide(sample, scripted.now_s))
        if (step := found[-1].step) is not None and acts:
            controller.took(step, scripted.now_s)
            scripted.change(step)
    return found


def overloaded(decode: int = 4) -> tuple[RoleController, ScriptedFleet]:
    """A fleet whose only prefill worker gets three times what it can compute, after calm."""
    scripted = fleet(1, decode, rate=4.0)
    controller = RoleController(GOALS)
    assert {each.step for each in run(controller, scripted, 40)} == {None}
    scripted.rate = 30.0
    return controller, scripted


def until(controller: RoleController, scripted: ScriptedFleet, reason: str, most: int = 30) -> int:
    """Return after how many seconds the reason is given first."""
    for second in range(most):
        if controller.decide(scripted.tick(), scripted.now_s).reason == reason:
            return second + 1
    raise AssertionError(f"never {reason}")


def first_step(controller: RoleController, scripted: ScriptedFleet) -> RoleStep:
    for _ in range(20):
        step = controller.decide(scripted.tick(), scripted.now_s).step
        if step is not None:
            return step
    raise AssertionError("no step was taken")
