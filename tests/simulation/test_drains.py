"""What the lab takes for a request that a draining worker hands back too early, and what not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from baton.decode_worker.worker import DecodeWorker
from baton.runtime.errors import BatonError, Draining, EngineError, StalePlacement
from baton.simulation.invariants.drains import Drains

DRAIN_S = 1.0


class Bench:
    """A worker that began to drain at 5 s by the world's clock, and one request of it."""

    def __init__(self) -> None:
        self.breaches: list[str] = []
        self.failed: list[BaseException] = []
        config = SimpleNamespace(worker=SimpleNamespace(drain_s=DRAIN_S))
        self.loop = SimpleNamespace(world_s=5.0)
        world: Any = SimpleNamespace(loop=self.loop, config=config)
        self.sequence: Any = SimpleNamespace(
            ended=False, request=SimpleNamespace(request_id="req-1")
        )
        self.requests = SimpleNamespace(fail=lambda _, error: self.failed.append(error))
        machine = SimpleNamespace(name="d0", rate=1.0)
        worker = Mock(spec=DecodeWorker, _requests=self.requests)
        process: Any = SimpleNamespace(boot_id=b"b", machine=machine, worker=worker)
        Drains(world, self.breaches)
        world.restart_stage("begins", process)

    def fail(self, error: BatonError, after_s: float) -> list[str]:
        self.loop.world_s = 5.0 + after_s
        self.requests.fail(self.sequence, error)
        assert self.failed == [error]  # whatever the lab thinks of it
        return self.breaches


def test_a_return_before_the_drain_time_breaks_the_promise() -> None:
    (reported,) = Bench().fail(Draining("the decode worker is stopping"), 0.4)
    assert reported == "d0 drains, and hands back req-1 after 0.400 s of 1 s"


@pytest.mark.parametrize(
    ("error", "after_s"),
    [
        (Draining("the decode worker is stopping"), DRAIN_S),
        (EngineError("a step failed"), 0.4),
        (StalePlacement("every prefill worker of the placement has left"), 0.4),
    ],
)
def test_a_failure_after_the_drain_or_of_another_kind_is_allowed(
    error: BatonError, after_s: float
) -> None:
    assert Bench().fail(error, after_s) == []


def test_a_sequence_that_has_ended_is_not_handed_back() -> None:
    bench = Bench()
    bench.sequence.ended = True
    assert bench.fail(Draining("the decode worker is stopping"), 0.4) == []
