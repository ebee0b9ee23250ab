"""Overdue workers as the leader reports them: gauge, log, and no more that are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, MutableMapping, Sequence

import pytest
from structlog.testing import capture_logs

from baton.planner import overdue_workers
from baton.planner.control import size_step
from baton.planner.control.overdue_watch import (
    PROBLEM_AFTER_S,
    PROBLEM_INTERVAL_S,
    REMEDIES,
    OverdueWatch,
)
from baton.planner.control.worker_count import WorkerCount
from baton.planner.controller_load import FleetSample, WorkerSample
from baton.planner.overdue_workers import OVERDUE_REASONS, STUCK_S, WorkerProblem
from baton.runtime import metrics
from baton.runtime.errors import Unavailable
from tests.support.sized_scene import ScriptedPool, SizedScene

NO_NODE = WorkerProblem("no_node", "pod d1: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu")
CRASH = WorkerProblem("crash", "pod d2: its container worker has ended 4 times")


class RecordedPool(ScriptedPool):
    """A pool that counts for which workers it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.looked: list[list[str]] = []

    async def problems(self, missing: Collection[str]) -> dict[str, WorkerProblem]:
        self.looked.append(list(missing))
        return await super().problems(missing)


class Site:
    """Workers d0, d1 and so on, of which `there` are ready."""

    def __init__(self, workers: int = 3) -> None:
        self.asked = tuple(f"d{number}" for number in range(workers))
        self.there = {"d0"}
        self.pool = RecordedPool()
        self.now_s = 0.0
        self.watch = OverdueWatch(self.pool, 900.0, lambda: self.now_s)
        self.logs: Sequence[Mapping[str, object]] = ()

    async def pass_by(self, seconds: float) -> dict[str, float]:
        """Return the gauge by reason, without zeros; `logs` has the events."""
        with capture_logs() as logs:
            for _ in range(int(seconds)):
                self.now_s += 1.0
                workers = [WorkerSample(name, name, "decode", "ready") for name in self.there]
                self.watch.look(
                    WorkerCount("1", self.asked), FleetSample(self.now_s, tuple(workers))
                )
                await asyncio.sleep(0)  # the reading of problems may end
        self.logs = logs
        return gauge()

    def events(self) -> list[str]:
        return [str(each["event"]) for each in self.logs]


def gauge() -> dict[str, float]:
    found: MutableMapping[str, float] = {}
    for reason in OVERDUE_REASONS:
        value = metrics.REGISTRY.get_sample_value("baton_overdue_workers", {"reason": reason})
        assert value is not None
        found[reason] = value
    return {reason: value for reason, value in found.items() if value}


async def test_overdue_workers_are_reported_once_with_the_remedy() -> None:
    site = Site()
    site.pool.found = {"d1": NO_NODE, "d2": CRASH}
    assert await site.pass_by(STUCK_S) == {}
    assert await site.pass_by(60) == {"no_node": 1.0, "crash": 1.0}
    assert [(e["event"], e["reason"]) for e in site.logs] == [
        ("workers overdue", "no_node"), ("workers overdue", "crash")
    ]  # fmt: skip
    said = {"log_level": "warning", "count": 1, "workers": ["d1"], "detail": NO_NODE.detail}
    assert site.logs[0].items() >= {**said, "remedy": REMEDIES["no_node"]}.items()
    site.there |= {"d1", "d2"}
    assert await site.pass_by(5) == {} and site.events() == ["overdue workers resolved"]
    await site.watch.close()


async def test_a_changed_reason_is_reported() -> None:
    site = Site(workers=2)
    site.pool.found = {"d1": NO_NODE}
    await site.pass_by(STUCK_S + 1)
    site.pool.found = {"d1": WorkerProblem("image", "pod d1: ImagePullBackOff")}
    assert await site.pass_by(3 * PROBLEM_INTERVAL_S) == {"image": 1.0}
    assert site.events() == ["workers overdue"] and site.logs[0]["reason"] == "image"
    await site.watch.close()


async def test_problems_are_asked_for_seldom() -> None:
    site = Site(workers=40)
    await site.pass_by(PROBLEM_AFTER_S)
    assert site.pool.looked == []
    await site.pass_by(10 * PROBLEM_INTERVAL_S)
    assert len(site.pool.looked) == 10
    assert all(each == list(site.asked[1:]) for each in site.pool.looked)
    site.there |= set(site.asked)
    await site.pass_by(10 * PROBLEM_INTERVAL_S)
    assert len(site.pool.looked) == 10, "no worker is missing"
    await site.watch.close()


async def test_problems_that_are_not_read_delay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An account without the right, or an API that hangs: workers are overdue by time alone."""
    monkeypatch.setattr(size_step, "CALL_S", 0.01)
    site = Site(workers=2)
    site.pool.hangs = "problems"
    assert await site.pass_by(200) == {}
    events = site.events()
    await asyncio.sleep(0.03)  # the limit of the call passes
    site.pool.hangs, site.pool.faults["problems"] = "", Unavailable("403: may not get pods")
    assert await site.pass_by(800) == {"not_ready": 1.0}
    events += site.events()
    assert events.count("worker problems not read") == 2  # once for each reason
    await site.watch.close()


async def test_a_reading_that_fails_leaves_what_was_known() -> None:
    site = Site(workers=2)
    site.pool.found = {"d1": NO_NODE}
    assert await site.pass_by(STUCK_S + 1) == {"no_node": 1.0}
    site.pool.faults["problems"] = Unavailable("the API server does not answer")
    assert await site.pass_by(3 * PROBLEM_INTERVAL_S) == {"no_node": 1.0}
    assert site.events() == ["worker problems not read"]
    await site.watch.close()


async def test_a_controller_that_does_not_lead_reports_none() -> None:
    site = Site()
    site.pool.found = {"d1": NO_NODE}
    assert await site.pass_by(STUCK_S + 1) == {"no_node": 1.0}
    site.watch.rest()
    assert gauge() == {}
    assert await site.pass_by(STUCK_S) == {}
    assert await site.pass_by(1) == {"no_node": 1.0}
    await site.watch.close()
    site.watch.rest()


def test_each_reason_has_a_remedy() -> None:
    assert set(REMEDIES) == set(OVERDUE_REASONS)


async def test_no_more_are_asked_for_while_one_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overdue_workers, "STUCK_S", 40.0)
    scene = SizedScene()
    scene.pool.asked, scene.pool.last = 6, "d4"  # which is not there
    scene.pool.found = {"d4": NO_NODE}
    await scene.flood()
    assert scene.pool.calls == [] and gauge() == {"no_node": 1.0}
    report = scene.loop.size_report()
    assert report["reason"] == "overdue" and "1 of them are overdue" in report["text"]
    assert report["overdue"][0]["worker_id"] == "d4"
    scene.leadership.leads = False
    await scene.pass_by(1)
    assert gauge() == {} and scene.loop.size_report() == {}
