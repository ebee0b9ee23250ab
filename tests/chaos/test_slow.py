"""A worker that is stopped and let go on in turn: what its steps and the routers say of it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from chaos import slow as scenario
from chaos.slow import Steps, not_slow, slow
from chaos.stage import Stage

STOP_S, GO_S = 0.004, 0.001


class Worker:
    """One of three, with two routers. A step takes `usual_s`, and of the one that is stopped
    `slow_s`; each router's circuit opens after some turns."""

    def __init__(self, usual_s: float, slow_s: float) -> None:
        self.usual_s, self.slow_s = usual_s, slow_s
        self.reported: list[signal.Signals] = []
        self.fails_at: int | None = None
        self.opens_ever = True

    def names(self) -> list[str]:
        return ["prefill-0", *self.workers(), "router", "router-1"]

    def workers(self) -> list[str]:
        return ["decode-0", "decode-1", "decode-2"]

    def wait_ready(self, workers: int) -> None:
        assert self.reported[-1] is signal.SIGCONT

    def kill(self, name: str, number: signal.Signals) -> None:
        assert name == "decode-0"
        if len(self.reported) == self.fails_at:
            self.fails_at = None
            raise ProcessLookupError
        self.reported.append(number)

    def metric(self, name: str, metric: str, **labels: str) -> float:
        if name.startswith("router"):
            assert (metric, labels) == ("baton_circuits_opened_total", {"reason": "slow"})
            return 2.0 + self.opens
        assert labels == {"role": "decode"}
        count = 100.0 + 20.0 * bool(self.reported)
        if metric == "baton_step_seconds_count":
            return count
        assert metric == "baton_step_seconds_sum"
        taken_s = self.slow_s if name == "decode-0" else self.usual_s
        return 100.0 * 7.0 + (count - 100.0) * taken_s

    @property
    def opens(self) -> bool:
        return self.opens_ever and len(self.reported) > 4


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "STOPPED_S", STOP_S)
    monkeypatch.setattr(scenario, "RUNS_S", GO_S)


def stage_of(cluster: Worker) -> Stage:
    made: Any = cluster
    no_clients: Any = None
    return Stage(cluster=made, clients=no_clients, asks=(), longs=(), hold_s=0.05)


async def test_a_worker_is_paused_in_turns_and_reported_with_circuits() -> None:
    cluster = Worker(usual_s=0.02, slow_s=0.15)
    stage = stage_of(cluster)
    await slow(stage, "decode-0")
    *turns, last = cluster.reported
    assert len(turns) >= 4 and last is signal.SIGCONT
    assert turns == [signal.SIGSTOP, signal.SIGCONT] * (len(turns) // 2)
    assert stage.notes == [
        "its steps took 150 ms, its fellows' 20 ms; 2 of 2 routers opened its circuit"
    ]
    assert (stage.void, stage.broken) == (None, [])


async def test_one_that_was_not_much_slower_shows_nothing() -> None:
    cluster = Worker(usual_s=0.02, slow_s=0.09)
    cluster.opens_ever = False
    stage = stage_of(cluster)
    await slow(stage, "decode-0")
    assert stage.notes[0].endswith("0 of 2 routers opened its circuit")
    assert stage.void == "it was only 4.5 times as slow"


async def test_it_goes_on_whatever_happens() -> None:
    cluster = Worker(usual_s=0.02, slow_s=0.15)
    cluster.fails_at = 3  # as it should go on
    with pytest.raises(ProcessLookupError):
        await slow(stage_of(cluster), "decode-0")
    assert cluster.reported[-2:] == [signal.SIGSTOP, signal.SIGCONT]


@pytest.mark.parametrize(
    ("usual_s", "slow_s", "void"),
    [(0.02, 0.1, False), (0.02, 0.099, True), (0.0, 0.1, True), (0.02, 0.0, True)],
)
def test_five_times_as_slow_it_has_to_be(usual_s: float, slow_s: float, void: bool) -> None:
    assert bool(not_slow(usual_s, slow_s)) is void


def test_steps_count_since_then() -> None:
    assert Steps(6.0, 9.0).mean_s(Steps(4.0, 8.0)) == 0.5
    assert Steps(4.0, 8.0).mean_s(Steps(4.0, 8.0)) == 0.0
