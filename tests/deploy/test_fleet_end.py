"""The end of a fleet: how long it is waited for, what is tried again, and what remains."""

from __future__ import annotations

import pytest

from baton.deploy.host.fleet_end import DRIVER_END_S, END_RETRY_S, RAY_CALL_S, WORKERS_END_S
from baton.deploy.nodes.fleet_driver import END_PAUSE_S
from baton.runtime.errors import Unavailable
from tests.support.driver_scene import DriverScene, order

GRACE_S = 24.0


def test_the_end_waits_for_workers_and_then_removes_their_actors() -> None:
    scene = DriverScene(order("decode-0"), order("prefill-0"))
    scene.turns(scene.driver)
    assert scene.driver.end(deadline_s=60.0) == []
    assert sorted(scene.fleet.removed) == ["decode-0", "prefill-0"]


def test_a_long_end_is_asked_for_twice_a_second() -> None:
    scene = DriverScene(order("decode-0"))
    scene.turns(scene.driver)
    scene.fleet.ends = False
    began = scene.now
    assert scene.driver.end(deadline_s=began + 30.0) == ["decode-0"]
    assert scene.now == began + 30.0 + END_PAUSE_S
    assert len(scene.fleet.ended) == 62


def test_an_end_without_ray_says_which_workers_serve_on() -> None:
    scene = DriverScene(order("decode-0"), order("decode-1"))
    scene.turns(scene.driver)
    scene.fleet.lost = True
    began = scene.now
    with pytest.raises(Unavailable, match="decode-0, decode-1 may serve on: start `baton fleet`"):
        scene.driver.end(deadline_s=1000.0)
    assert scene.now - began == END_RETRY_S + END_PAUSE_S


def test_an_end_outlasts_a_head_that_is_restarted() -> None:
    scene = DriverScene(order("decode-0"), order("decode-1"))
    scene.turns(scene.driver)
    scene.fleet.lost = True

    def pause(seconds: float) -> None:
        scene.now += seconds
        scene.fleet.lost = scene.now < END_RETRY_S / 2

    scene.on_pause = pause
    assert scene.driver.end(deadline_s=1000.0) == []
    assert sorted(scene.fleet.removed) == ["decode-0", "decode-1"]


def test_one_removal_that_fails_holds_up_no_other() -> None:
    """It is tried again until the deadline and a while longer, and then named."""
    scene = DriverScene(order("decode-0"), order("decode-1"))
    scene.turns(scene.driver)
    scene.fleet.failing = {"decode-0"}
    with pytest.raises(Unavailable, match="not answer; decode-0 may serve on") as raised:
        scene.driver.end(deadline_s=scene.now + 60.0)
    assert "decode-1" not in str(raised.value)
    assert scene.fleet.removed == ["decode-1"] and scene.now > 60.0 + END_RETRY_S


def test_the_driver_reports_before_its_supervisor_kills_it() -> None:
    """Calls of Ray wait for their longest when the signal comes and when the time to retry ends."""
    scene = DriverScene(order("decode-0"))
    scene.turns(scene.driver)
    began = scene.now
    scene.now += RAY_CALL_S  # of a turn that the signal met
    deadline_s = scene.now + GRACE_S + WORKERS_END_S
    scene.fleet.ends, scene.fleet.failing = False, {"decode-0"}

    def pause(seconds: float) -> None:
        lasting = scene.now == deadline_s + END_RETRY_S
        scene.now += RAY_CALL_S - seconds if lasting else seconds

    scene.on_pause = pause
    with pytest.raises(Unavailable, match="decode-0 may serve on"):
        scene.driver.end(deadline_s)
    assert scene.now > deadline_s + END_RETRY_S + RAY_CALL_S / 2
    assert scene.now - began < GRACE_S + DRIVER_END_S


def test_a_removal_that_fails_for_a_moment_is_repeated() -> None:
    scene = DriverScene(order("decode-0"), order("decode-1"))
    scene.turns(scene.driver)
    scene.fleet.ends, scene.fleet.failing = False, {"decode-0"}

    def pause(seconds: float) -> None:
        scene.now += seconds
        scene.fleet.failing = {"decode-0"} if scene.now < 10.0 else set()

    scene.on_pause = pause
    assert scene.driver.end(deadline_s=5.0) == ["decode-0", "decode-1"]
    assert scene.fleet.removed == ["decode-1", "decode-0"] and scene.now < 11.0


def test_the_end_names_the_workers_that_did_not_end() -> None:
    scene = DriverScene(order("decode-0"))
    scene.turns(scene.driver)
    scene.fleet.ends = False
    assert scene.driver.end(deadline_s=-1.0) == ["decode-0"]
    assert scene.fleet.reports == {}
