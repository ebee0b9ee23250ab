"""The role controller's decisions: what it does, and each of the reasons for which it does not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from baton.planner.controller import (
    CHANGE_S,
    CHANGES_PER_WORKER,
    COOL_DOWN_S,
    EMPTY_S,
    HOLD_S,
    MIN_SPAN_S,
    REASONS,
    REFUSED_S,
    REVERSAL_S,
    STALE_S,
    Decision,
    RoleController,
    RoleStep,
)
from baton.planner.controller_forecast import ServiceGoals, forecast, needed_workers
from baton.planner.controller_load import (
    FleetLoad,
    FleetSample,
    LoadWindow,
    StepSpeed,
    WorkerRole,
    WorkerSample,
    WorkerState,
    fit_steps,
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


def fleet(prefill: int, decode: int, **values: float) -> ScriptedFleet:
    names = {f"p{n}": "prefill" for n in range(prefill)} | {
        f"d{n}": "decode" for n in range(decode)
    }
    roles: dict[str, WorkerRole] = {
        name: "prefill" if role == "prefill" else "decode" for name, role in names.items()
    }
    return ScriptedFleet(roles, **values)


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


def test_overloaded_prefill_gets_a_worker_within_ten_seconds() -> None:
    controller, scripted = overloaded()
    decisions = run(controller, scripted, 10)
    taken = [each for each in decisions if each.step is not None]
    assert taken and taken[0].step is not None and taken[0].step.role == "prefill"
    assert "becomes a prefill worker: 1:4 is predicted to serve" in taken[0].text
    assert taken[0].now is not None and taken[0].best is not None
    assert taken[0].best.goodput_per_s > taken[0].now.goodput_per_s


def test_overloaded_decode_gets_a_worker() -> None:
    scripted = fleet(4, 1, rate=2.0, tokens=100.0)
    controller = RoleController(GOALS)
    run(controller, scripted, 30)
    scripted.rate = 10.0  # 1,000 tokens a second: a batch of 20 and more for each step of 30 ms
    roles = {each.step.role for each in run(controller, scripted, 30) if each.step is not None}
    assert roles == {"decode"}


def test_a_load_that_any_ratio_serves_moves_no_worker() -> None:
    scripted = fleet(2, 2, rate=1.0)
    decisions = run(RoleController(GOALS), scripted, 120)
    assert {each.reason for each in decisions} == {"learning", "small_gain"}
    assert "no other ratio more" in decisions[-1].text


def test_a_step_is_taken_only_after_its_reason_has_lasted() -> None:
    controller, scripted = overloaded()
    held_s = until(controller, scripted, "holding")
    taken_s = until(controller, scripted, "taken")
    assert taken_s >= HOLD_S > 0 and held_s < 10


def test_the_least_busy_worker_is_moved() -> None:
    controller, scripted = overloaded()
    until(controller, scripted, "holding")
    for _ in range(10):
        sample = scripted.tick()
        workers = tuple(
            replace(e, running=e.running + (e.worker_id != "d2")) for e in sample.workers
        )
        decision = controller.decide(FleetSample(sample.at_s, workers), scripted.now_s)
        if decision.step is not None:
            break
    assert decision.step == RoleStep("d2", "d2.0", "prefill")


# -- reasons for no step ------------------------------------------------------------------------


def test_stale_reports_are_not_acted_on() -> None:
    controller, scripted = overloaded()
    until(controller, scripted, "holding")
    for _ in range(20):
        sample = scripted.tick()
        decision = controller.decide(sample, scripted.now_s + STALE_S + 0.1)
        assert (decision.reason, decision.step) == ("stale", None)
        assert "5.1 s old" in decision.text


def test_the_same_report_again_moves_no_worker() -> None:
    """A reader that returns its last report for ever is stale once STALE_S has passed."""
    controller, scripted = overloaded()
    sample = scripted.tick()
    reasons = [controller.decide(sample, scripted.now_s + n).reason for n in range(20)]
    assert "taken" not in reasons and reasons[-1] == "stale"


def test_a_silent_worker_holds_every_step() -> None:
    controller, scripted = overloaded()
    scripted.states["d3"] = "unreachable"
    decisions = run(controller, scripted, 20)
    assert {each.reason for each in decisions} == {"unreachable"}
    assert decisions[0].text == "no report of d3"


def test_a_worker_without_counters_is_not_called_silent() -> None:
    controller, scripted = overloaded()
    scripted.states |= {"d2": "no counters", "d3": "unreachable"}
    (decision,) = run(controller, scripted, 1)
    assert decision.reason == "unreachable"
    assert decision.text.startswith("no report of d3; an older version without counters on d2:")


def test_a_controller_that_starts_again_learns_first() -> None:
    _, scripted = overloaded()
    decisions = run(RoleController(GOALS), scripted, int(MIN_SPAN_S))
    assert {each.reason for each in decisions} == {"learning"}


def test_prefill_workers_that_compute_nothing_can_be_moved() -> None:
    """All prompts are computed locally: a prefill worker's speed will never be known."""
    scripted = fleet(3, 1, rate=0.5, tokens=0.0)
    controller = RoleController(GOALS)
    run(controller, scripted, 30)
    scripted.rate = 10.0
    decisions = run(controller, scripted, 60)
    steps = [each for each in decisions if each.step is not None]
    assert {each.step.role for each in steps if each.step is not None} == {"decode"}
    assert decisions[0].wanted["prefill"] == 1
    assert len(scripted.of("prefill")) >= 1


def test_a_gap_in_the_reports_begins_the_rates_again() -> None:
    controller, scripted = overloaded()
    scripted.tick(30.0)
    assert run(controller, scripted, 1)[0].reason == "learning"


def test_no_traffic_is_a_reason_of_its_own() -> None:
    scripted = fleet(2, 2, rate=0.0)
    assert run(RoleController(GOALS), scripted, 20)[-1].reason == "idle"


@pytest.mark.parametrize("decode", [1, 2, 3])
def test_the_last_worker_of_a_role_stays(decode: int) -> None:
    controller, scripted = overloaded(decode)
    scripted.rate = 1000.0
    for decision in run(controller, scripted, 200):
        assert decision.reason in REASONS
        assert len(scripted.of("decode")) >= 1
    if decode == 1:
        assert until(controller, scripted, "last_worker") >= 1


def test_a_direction_that_was_better_before_does_not_count_on() -> None:
    """No ratio of the last two workers is better, whatever the reason for no step says."""
    controller, scripted = overloaded(1)
    scripted.rate = 1000.0
    until(controller, scripted, "last_worker")
    controller._better = ("decode", scripted.now_s - HOLD_S)
    assert run(controller, scripted, 1)[0].reason == "last_worker"
    assert controller._better is None


def test_ready_workers_count_and_not_registered_ones() -> None:
    """Two decode workers, of which one is not ready: the other one is the last."""
    controller, scripted = overloaded(2)
    scripted.states["d1"] = "not ready"
    decisions = run(controller, scripted, 30)
    assert all(each.step is None for each in decisions)
    assert "last_worker" in {each.reason for each in decisions}


@pytest.mark.parametrize("rate", [0.0, 4.0])
@pytest.mark.parametrize("roles", [(3, 0), (0, 3)])
def test_a_role_without_workers_gets_one(roles: tuple[int, int], rate: float) -> None:
    """No traffic is no reason to leave it so: without a decode worker nothing can be served."""
    scripted = fleet(*roles, rate=rate)
    decisions = run(RoleController(GOALS), scripted, int(MIN_SPAN_S + EMPTY_S) + 3)
    steps = [each for each in decisions if each.step is not None]
    assert len(steps) == 1 and steps[0].step is not None
    assert steps[0].step.role == ("prefill" if roles[0] == 0 else "decode")
    assert min(len(scripted.of("prefill")), len(scripted.of("decode"))) == 1
    before = [each.reason for each in decisions if each.at_s < steps[0].at_s]
    assert set(before) == {"learning", "last_worker"}
    assert before.count("last_worker") >= EMPTY_S


@pytest.mark.parametrize("roles", [(1, 0), (0, 1), (0, 0)])
def test_the_only_worker_of_a_fleet_keeps_its_role(roles: tuple[int, int]) -> None:
    scripted = fleet(*roles, rate=0.0)
    decisions = run(RoleController(GOALS), scripted, 200)
    assert {each.reason for each in decisions} == {"learning", "last_worker"}
    assert "start more workers" in decisions[-1].text


def test_a_worker_that_is_away_for_a_moment_is_not_replaced() -> None:
    scripted = fleet(3, 1, rate=0.0)
    controller = RoleController(GOALS)
    run(controller, scripted, 20)
    del scripted.roles["d0"]
    decisions = run(controller, scripted, int(EMPTY_S) - 1)
    assert {each.reason for each in decisions} == {"last_worker"}
    scripted.roles["d0"] = "decode"
    assert run(controller, scripted, 1)[0].reason == "idle"
    del scripted.roles["d0"]  # its time counts anew
    assert {each.step for each in run(controller, scripted, int(EMPTY_S) - 1)} == {None}


@pytest.mark.parametrize("name", ["d0", "p0"])
def test_a_drain_may_be_the_change_that_fills_the_role(name: str) -> None:
    """Another controller has ordered it, and was killed."""
    scripted = fleet(4, 1, rate=0.0)
    scripted.states |= {"d0": "not ready", name: "draining"}
    decisions = run(RoleController(GOALS), scripted, int(CHANGE_S) + 30)
    assert {each.reason for each in decisions} == {"learning", "last_worker"}
    assert f"{name} drains" in decisions[-1].text


def test_a_worker_that_is_not_ready_gets_the_time_of_a_change() -> None:
    scripted = fleet(3, 1, rate=0.0)
    scripted.states["d0"] = "not ready"
    decisions = run(RoleController(GOALS), scripted, int(CHANGE_S + MIN_SPAN_S) + 3)
    (step,) = (each for each in decisions if each.step is not None)
    assert step.at_s - decisions[0].at_s >= CHANGE_S


def test_a_reversal_that_fills_a_role_does_not_wait() -> None:
    scripted = fleet(3, 1, rate=0.0)
    controller = RoleController(GOALS)
    run(controller, scripted, 20)
    for role in ("decode", "prefill"):  # a reversal, whose change is still under way
        controller.took(RoleStep("p9", "p9.0", role), scripted.now_s)
    del scripted.roles["d0"]
    steps = [each.step for each in run(controller, scripted, int(EMPTY_S) + 2) if each.step]
    assert [step.role for step in steps] == ["decode"]


def test_a_role_is_filled_by_another_worker_if_one_refuses() -> None:
    scripted = fleet(2, 0, rate=0.0)
    controller = RoleController(GOALS)
    for name in ("p0", "p1"):
        until(controller, scripted, "taken")
        controller.refused(RoleStep(name, f"{name}.0", "decode"), scripted.now_s)
    assert until(controller, scripted, "no_worker") == 1


def test_one_change_at_a_time_in_a_small_fleet() -> None:
    controller, scripted = overloaded()
    step = first_step(controller, scripted)
    controller.took(step, scripted.now_s)
    scripted.states[step.worker_id] = "draining"
    decisions = run(controller, scripted, 20, acts=False)
    assert all(each.step is None for each in decisions)
    assert {each.reason for each in decisions} <= {"changing", "holding", "small_gain"}


def test_a_change_of_another_controller_counts() -> None:
    """A controller that was killed in a change leaves a draining worker: the next one waits."""
    _, scripted = overloaded()
    scripted.states["d0"] = "draining"
    decisions = run(RoleController(GOALS), scripted, 30)
    assert all(each.step is None for each in decisions)
    assert "changing" in {each.reason for each in decisions}


def test_a_cool_down_follows_each_change() -> None:
    controller, scripted = overloaded(8)
    taken = [each.at_s for each in run(controller, scripted, 60) if each.step is not None]
    assert len(taken) >= 2
    gaps = [later - first for first, later in zip(taken, taken[1:], strict=False)]
    assert min(gaps) >= COOL_DOWN_S


def test_a_reversal_waits_for_the_one_before() -> None:
    """The mix turns each minute; directions change at most once in REVERSAL_S."""
    scripted = fleet(3, 3, rate=4.0)
    controller = RoleController(GOALS)
    steps: list[tuple[float, WorkerRole]] = []
    reasons = set()
    for minute in range(20):
        scripted.rate, scripted.tokens = (25.0, 100.0) if minute % 2 else (8.0, 6000.0)
        for each in run(controller, scripted, 60):
            reasons.add(each.reason)
            if each.step is not None:
                steps.append((each.at_s, each.step.role))
    turns = [b[0] for a, b in zip(steps, steps[1:], strict=False) if a[1] != b[1]]
    assert len(turns) >= 2
    gaps = [later - first for first, later in zip(turns, turns[1:], strict=False)]
    assert min(gaps) >= REVERSAL_S
    assert "reversal" in reasons


def test_an_hour_has_a_budget() -> None:
    controller, scripted = overloaded()
    step = RoleStep("d0", "d0.0", "prefill")
    for _ in range(CHANGES_PER_WORKER * len(scripted.roles)):
        controller.took(step, scripted.now_s)
    controller.decide(scripted.tick(CHANGE_S + 1), scripted.now_s)  # those changes have failed
    decisions = run(controller, scripted, 60)
    assert all(each.step is None for each in decisions)
    assert "budget" in {each.reason for each in decisions}


def test_a_worker_that_refuses_is_passed_over_for_a_while() -> None:
    controller, scripted = overloaded()
    refused = []
    for _ in range(4):
        step = first_step(controller, scripted)
        controller.refused(step, scripted.now_s)
        refused.append(step.worker_id)
    assert sorted(refused) == ["d0", "d1", "d2", "d3"]
    assert until(controller, scripted, "no_worker") < REFUSED_S
    assert until(controller, scripted, "taken", most=int(REFUSED_S) + 1) > 1


def test_a_change_that_never_ends_is_given_up() -> None:
    controller, scripted = overloaded()
    step = first_step(controller, scripted)
    controller.took(step, scripted.now_s)
    others = [each.step for each in run(controller, scripted, int(CHANGE_S) + 20) if each.step]
    assert others and others[0].worker_id != step.worker_id


# -- load and forecast --------------------------------------------------------------------------


def test_the_load_is_what_the_counters_say() -> None:
    scripted = fleet(2, 2, rate=10.0)
    window = LoadWindow()
    for _ in range(40):
        window.add(scripted.tick())
    load = window.load()
    assert load.requests_per_s == pytest.approx(10.0, rel=0.05)
    assert load.tokens_per_request == pytest.approx(1000, rel=0.05)
    assert load.output_per_request == pytest.approx(OUTPUT, rel=0.05)
    assert load.context_tokens == pytest.approx(CONTEXT, rel=0.1)
    assert load.prefill_rate == pytest.approx(PREFILL_RATE, rel=0.05)
    assert load.step_s == pytest.approx(0.010 + 0.001 * scripted.batch / 2, rel=0.1)


def test_a_new_boot_counts_from_its_own_zero() -> None:
    scripted = fleet(2, 2, rate=10.0)
    window = LoadWindow()
    for second in range(40):
        window.add(scripted.tick())
        if second == 30:
            scripted.change(RoleStep("d0", "d0.0", "decode"))
            scripted.change(RoleStep("p0", "p0.0", "prefill"))
    assert window.load().requests_per_s == pytest.approx(10.0, rel=0.15)
    assert window.load().prefill_rate == pytest.approx(PREFILL_RATE, rel=0.05)


def test_the_speed_of_steps_is_found_again() -> None:
    truth = StepSpeed(0.012, 3e-4, 2e-8)
    samples = [
        (batch, context, truth.fixed_s + truth.per_sequence_s * batch
         + truth.per_context_token_s * context)
        for batch in (1.0, 4.0, 16.0, 40.0)
        for context in (1e3 * batch, 5e3 * batch)
    ]  # fmt: skip
    found = fit_steps(samples)
    assert found is not None
    assert found.fixed_s == pytest.approx(truth.fixed_s)
    assert found.per_sequence_s == pytest.approx(truth.per_sequence_s)
    assert found.per_context_token_s == pytest.approx(truth.per_context_token_s)
    assert fit_steps(samples[:2]) is None


LOAD = FleetLoad(
    requests_per_s=8.0,
    prompt_tokens_per_s=32_000.0,
    tokens_per_request=4000.0,
    output_per_request=400.0,
    context_tokens=5000.0,
    backlog_tokens=0.0,
    waiting=0,
    running=40,
    kv_tokens=1_000_000,
    prefill_rate=10_000.0,
    step=StepSpeed(0.010, 0.0004, 2e-8),
    step_s=0.014,
)


def test_more_workers_of_a_role_never_serve_worse() -> None:
    for backlog in (0.0, 50_000.0, 500_000.0):
        load = replace(LOAD, backlog_tokens=backlog)
        ttft = [forecast(load, GOALS, n, 4).ttft_share for n in range(1, 12)]
        assert ttft == sorted(ttft)
        itl = [forecast(load, GOALS, 4, m).itl_share for m in range(1, 12)]
        assert itl == sorted(itl)


def test_a_queue_for_credit_is_seen_as_missing_decode_workers() -> None:
    """Prefill workers have nothing to do: the prompts wait for KV room."""
    load = replace(LOAD, kv_tokens=40_000, waiting=80, backlog_tokens=80 * 4000.0)
    few, many = (forecast(load, GOALS, 6, m) for m in (1, 8))
    assert few.served_share < 0.5 < many.served_share
    assert many.ttft_share > few.ttft_share


def test_saturated_prefill_serves_what_it_computes() -> None:
    found = forecast(LOAD, GOALS, 2, 6)  # 2 * 10,000 of 32,000 tokens a second
    assert found.served_share == pytest.approx(20 / 32)
    assert found.ttft_share < 0.3


def test_wanted_workers_are_the_fewest_that_suffice() -> None:
    wanted = needed_workers(LOAD, GOALS, 0.9, 32)
    for role, count in wanted.items():
        assert 1 < count < 32
        ratio = (count - 1, 32) if role == "prefill" else (32, count - 1)
        found = forecast(LOAD, GOALS, *ratio)
        share = found.ttft_share if role == "prefill" else found.itl_share * found.served_share
        assert share < 0.9
