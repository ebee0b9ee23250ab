"""The driver of a fleet against actors that are scripted: what it makes, replaces and ends."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from structlog.testing import capture_logs

from baton.deploy.host.fleet_progress import WorkerProgress
from baton.deploy.nodes.fleet_driver import LOST_S
from baton.deploy.nodes.fleet_metrics import RestartReason
from baton.runtime import metrics
from baton.runtime.errors import Unavailable
from tests.support.driver_scene import DriverScene, changed_report, order

REASONS = get_args(RestartReason)


def test_missing_workers_are_made_where_they_run_already() -> None:
    scene = DriverScene(order("prefill-0"), order("decode-0"), hosts={"decode-0": "10.0.0.2"})
    scene.fleet.room = {"10.0.0.2": {"CPU": 1.0}}
    scene.turns(scene.driver, 3)
    assert scene.fleet.made == [("decode-0", "10.0.0.2"), ("prefill-0", None)]
    assert scene.driver.ready() == ["decode-0", "prefill-0"]
    assert scene.driver.waiting() == {}


def test_workers_are_missing_until_ray_was_asked() -> None:
    """Else `/readyz` of the admin port would be green before the first turn."""
    scene = DriverScene(order("decode-0"))
    assert scene.driver.summary().waiting == {"decode-0": "Ray has not been asked yet"}
    scene.turns(scene.driver)
    assert not scene.driver.summary().waiting


def test_a_worker_without_its_node_takes_no_room_of_another() -> None:
    """Its node is lost, or joins a new Ray later."""
    hosts = {"prefill-0": "10.0.0.9", "decode-0": "10.0.0.2"}
    scene = DriverScene(order("prefill-0"), order("decode-0"), hosts=hosts)
    scene.fleet.room = {"10.0.0.1": {"CPU": 1.0}, "10.0.0.2": {"CPU": 1.0}}
    scene.turns(scene.driver)
    assert scene.fleet.made == [("decode-0", "10.0.0.2"), ("prefill-0", "10.0.0.1")]


def test_added_workers_go_to_a_node_that_has_joined() -> None:
    scene = DriverScene(order("decode-0"), order("decode-1"))
    scene.turns(scene.driver)
    scene.fleet.room = {"10.0.0.1": {"CPU": 8.0}, "10.0.0.2": {"CPU": 8.0}, "10.0.0.3": {}}
    more = [order(f"decode-{number}") for number in range(5)]
    scene.turns(scene.new_driver(*more))
    assert scene.fleet.made[2:] == [
        ("decode-2", "10.0.0.1"), ("decode-3", "10.0.0.2"), ("decode-4", "10.0.0.1")
    ]  # fmt: skip
    scene = DriverScene(order("decode-0"), order("decode-1"))
    scene.turns(scene.driver)
    scene.fleet.room = {"10.0.0.1": {"CPU": 8.0}, "10.0.0.2": {"CPU": 2.0}, "10.0.0.3": {}}
    scene.hosts = {"decode-0": "10.0.0.1", "decode-1": "10.0.0.1"}
    driver = scene.new_driver(*more)
    scene.turns(driver, 3)
    added = [("decode-2", "10.0.0.2"), ("decode-3", "10.0.0.2"), ("decode-4", "10.0.0.1")]
    assert scene.fleet.made[2:] == added
    assert scene.fleet.ended == [] and len(driver.ready()) == 5


def test_a_worker_that_is_replaced_goes_to_the_emptiest_node() -> None:
    scene = DriverScene(order("decode-0"), order("decode-1"))
    scene.turns(scene.driver)
    scene.fleet.room = {"10.0.0.1": {"CPU": 2.0}, "10.0.0.2": {"CPU": 2.0}}
    driver = scene.new_driver(order("decode-0", "10"), order("decode-1", "10"))
    scene.turns(driver, 9)
    assert {name: e.node for name, e in scene.fleet.reports.items()} == {
        "decode-0": "10.0.0.2", "decode-1": "10.0.0.1"
    }  # fmt: skip


def test_a_packed_fleet_fills_one_node_and_then_the_next() -> None:
    scene = DriverScene()
    scene.fleet.room = {"10.0.0.1": {"CPU": 2.0}, "10.0.0.2": {"CPU": 2.0}}
    orders = [order(name) for name in ("prefill-0", "decode-0", "decode-1", "decode-2")]
    scene.turns(scene.new_driver(*orders, pack=True))
    assert [host for _, host in scene.fleet.made] == ["10.0.0.1"] * 2 + ["10.0.0.2"] * 2


def test_groups_without_an_actor_stay_for_wanted_workers() -> None:
    scene = DriverScene(order("decode-0"), order("decode-1"))
    scene.turns(scene.driver)
    assert scene.fleet.kept == [{"decode-0", "decode-1"}]
    scene.driver.end(100.0)
    assert scene.fleet.kept[1:] and not any(scene.fleet.kept[1:])


def test_another_driver_finds_the_actors_and_makes_none() -> None:
    scene = DriverScene(order("decode-0"))
    scene.turns(scene.driver)
    again = scene.new_driver(order("decode-0"))
    scene.turns(again)
    assert len(scene.fleet.made) == 1 and again.ready() == ["decode-0"]


def test_an_actor_that_is_gone_is_made_again() -> None:
    scene = DriverScene(order("decode-0"))
    scene.turns(scene.driver)
    del scene.fleet.reports["decode-0"]
    scene.turns(scene.driver)
    assert len(scene.fleet.made) == 2 and scene.driver.ready() == ["decode-0"]


def test_a_silent_actor_is_lost_and_found_with_one_log_each() -> None:
    scene = DriverScene(order("decode-0"))
    scene.turns(scene.driver)
    with capture_logs() as logs:
        scene.fleet.silent = {"decode-0"}
        scene.turns(scene.driver, int(LOST_S) + 5)
        assert scene.driver.ready() == []
        assert scene.driver.waiting() == {"decode-0": "its node 10.0.0.1 does not answer"}
        scene.fleet.silent = set()
        scene.turns(scene.driver, 2)
    assert [e["event"] for e in logs] == ["worker actor lost", "worker actor found"]
    assert scene.driver.ready() == ["decode-0"] and len(scene.fleet.made) == 1


def test_a_worker_without_a_node_is_named_with_what_it_needs() -> None:
    scene = DriverScene(replace(order("decode-0"), gpus=2.0, by_role=True))
    scene.fleet.silent = {"decode-0"}
    scene.turns(scene.driver)
    assert scene.driver.waiting() == {
        "decode-0": "no node has room for it (CPU 1, GPU 2, baton-decode 1)"
    }


def test_workers_with_other_settings_are_replaced_one_by_one() -> None:
    before = [order(name) for name in ("prefill-0", "decode-0", "decode-1")]
    scene = DriverScene(*before)
    scene.turns(scene.driver)
    after = [order(each.worker_id, blocks="10") for each in before]
    driver = scene.new_driver(*after)
    fewest = 3
    for _ in range(20):
        scene.turns(driver)
        fewest = min(fewest, len(driver.ready()))
    assert fewest == 2
    assert {name: e.order for name, e in scene.fleet.reports.items()} == {
        each.worker_id: each for each in after
    }
    assert sorted(scene.fleet.removed) == ["decode-0", "decode-1", "prefill-0"]


def test_a_worker_that_is_not_ready_is_replaced_first() -> None:
    scene = DriverScene(order("decode-0"), order("decode-1"))
    scene.turns(scene.driver)
    broken = scene.fleet.reports["decode-1"]
    scene.fleet.reports["decode-1"] = replace(broken, state="waiting", boot_id="")
    driver = scene.new_driver(order("decode-0", blocks="10"), order("decode-1", blocks="10"))
    scene.turns(driver)
    assert scene.fleet.ended == ["decode-1"]


@pytest.mark.parametrize(
    ("living", "registered", "removed"),
    [
        ("10.0.0.1", {}, ["decode-1"]),
        ("10.0.0.2", {}, []),  # its node lives: the actor answers later
        ("10.0.0.1", {"decode-1": "10.0.0.2"}, []),  # cut off, and its worker runs
        ("10.0.0.1", None, []),  # whether its worker runs is not known: no registry answers
        ("", {}, []),  # which nodes live is not known
    ],
)
def test_a_worker_that_left_with_its_node_waits_for_no_other(
    living: str, registered: dict[str, str] | None, removed: list[str]
) -> None:
    """Ray would make its actor again on the next node with room, only to end it there."""
    scene = DriverScene(order("decode-0"), order("decode-1"))
    scene.turns(scene.driver)
    scene.fleet.reports["decode-1"] = replace(scene.fleet.reports["decode-1"], node="10.0.0.2")
    scene.turns(scene.driver)
    scene.fleet.ends, scene.fleet.silent = False, {"decode-1"}
    scene.fleet.room = {living: {"CPU": 8.0}} if living else {}
    scene.hosts = registered
    scene.driver.follow([order("decode-0")])
    scene.turns(scene.driver, int(LOST_S))
    assert scene.fleet.removed == []
    scene.turns(scene.driver, 4)
    assert scene.fleet.removed == removed


def test_a_turn_reads_the_registry_once_for_all_lost_workers() -> None:
    """A reading may take seconds, and a node that is lost had many."""
    names = [f"decode-{number}" for number in range(6)]
    scene = DriverScene(*map(order, names))
    scene.turns(scene.driver)
    scene.fleet.ends, scene.fleet.silent = False, set(names)
    scene.fleet.room, scene.hosts = {"10.0.0.2": {"CPU": 8.0}}, dict.fromkeys(names, "10.0.0.1")
    scene.driver.follow([])
    scene.turns(scene.driver, int(LOST_S) + 2)
    before = scene.readings
    scene.turns(scene.driver, 3)
    assert scene.readings - before == 3 and scene.fleet.removed == []
    scene.hosts = {}
    scene.turns(scene.driver)
    assert sorted(scene.fleet.removed) == names


def test_a_smaller_fleet_ends_the_rest() -> None:
    scene = DriverScene(order("decode-0"), order("decode-1"))
    scene.turns(scene.driver)
    driver = scene.new_driver(order("decode-0"))
    scene.turns(driver, 3)
    assert scene.fleet.removed == ["decode-1"] and driver.ready() == ["decode-0"]


@pytest.mark.parametrize(
    ("registered", "removed"),
    [({}, ["decode-1"]), ({"decode-1": "10.0.0.1"}, []), (None, [])],
)
def test_an_actor_that_never_answered_may_have_a_worker(
    registered: dict[str, str] | None, removed: list[str]
) -> None:
    """Another driver made it, and its node does not answer: nothing else would end the worker."""
    scene = DriverScene(order("decode-0"), order("decode-1"))
    scene.turns(scene.driver)
    scene.fleet.ends, scene.fleet.silent = False, {"decode-1"}
    scene.hosts = registered
    scene.turns(scene.new_driver(order("decode-0")), int(LOST_S) + 4)
    assert scene.fleet.removed == removed


def test_a_worker_that_its_node_gave_up_is_reported_once() -> None:
    scene = DriverScene(order("decode-0"))
    scene.turns(scene.driver)
    failed = replace(
        scene.fleet.reports["decode-0"],
        state="failed",
        boot_id="",
        message="BATON_TOKEN is not set",
    )
    scene.fleet.reports["decode-0"] = failed
    with capture_logs() as logs:
        scene.turns(scene.driver, 3)
    hindered = [e for e in logs if e["event"] == "worker hindered"]
    assert [e["reason"] for e in hindered] == ["BATON_TOKEN is not set"]
    assert scene.driver.waiting() == {"decode-0": "BATON_TOKEN is not set"}
    assert scene.driver.end(deadline_s=60.0) == [] and scene.fleet.ended == []


def progress_of(scene: DriverScene, **changes: object) -> WorkerProgress:
    scene.fleet.reports["decode-0"] = changed_report(scene.fleet.reports["decode-0"], **changes)
    scene.turns(scene.driver)
    (found,) = scene.driver.summary().progress
    return found


def test_a_worker_s_progress_is_that_of_its_report() -> None:
    scene = DriverScene(order("decode-0"))
    scene.fleet.silent = {"decode-0"}
    scene.turns(scene.driver)
    assert scene.driver.summary().progress[0].text == "Ray starts its actor"
    scene.turns(scene.driver, int(LOST_S) + 1)
    assert "no node has room" in scene.driver.summary().progress[0].text
    scene.fleet.silent = set()
    with capture_logs() as logs:
        half = {"boot_id": "", "progress": "loading weights: 50 %", "log": "a line"}
        for _ in range(3):
            found = progress_of(scene, **half)
    assert found == WorkerProgress("decode-0", "10.0.0.1", "loading weights: 50 %", log="a line")
    loading = [each["progress"] for each in logs if each["event"] == "worker progress reported"]
    assert loading == ["loading weights: 50 %"]
    assert scene.driver.waiting() == {"decode-0": "loading weights: 50 % on 10.0.0.1"}
    found = progress_of(scene, boot_id="b", address="10.0.0.1:9", memory="2 GB", progress="")
    assert found == WorkerProgress("decode-0", "10.0.0.1", "", "10.0.0.1:9", "2 GB")


@pytest.mark.parametrize(
    ("changes", "given_up"),
    [({"state": "failed"}, True), ({"restarts": 2}, False), ({"restarts": 3}, True)],
)
def test_a_worker_that_never_gets_ready_is_given_up(
    changes: dict[str, object], given_up: bool
) -> None:
    scene = DriverScene(order("decode-0"))
    scene.fleet.silent = {"decode-0"}
    scene.turns(scene.driver)
    scene.fleet.silent = set()
    found = progress_of(scene, boot_id="", message="no model", log="its log", **changes)
    assert (found.text, found.given_up, found.log) == ("no model", given_up, "its log")


def test_a_worker_that_is_to_be_replaced_is_not_given_up() -> None:
    scene = DriverScene(order("decode-0"))
    scene.turns(scene.driver)
    failed = replace(scene.fleet.reports["decode-0"], state="failed", boot_id="")
    scene.fleet.reports["decode-0"] = failed
    scene.fleet.ends = False
    driver = scene.new_driver(order("decode-0", blocks="10"))
    scene.turns(driver)
    assert not driver.summary().progress[0].given_up


def test_a_worker_that_was_ready_may_start_again_and_again() -> None:
    scene = DriverScene(order("decode-0"))
    scene.turns(scene.driver)
    assert not progress_of(scene, boot_id="", restarts=9).given_up


def test_an_order_that_is_the_same_replaces_nothing() -> None:
    scene = DriverScene(order("decode-0"))
    scene.turns(scene.driver)
    scene.turns(scene.new_driver(order("decode-0")), 3)
    assert scene.fleet.ended == []


def value(name: str, **labels: str) -> float:
    found = metrics.REGISTRY.get_sample_value(name, labels)
    assert found is not None, name
    return found


def test_gauges_show_wanted_and_registered_workers() -> None:
    scene = DriverScene(order("prefill-0"), order("decode-0"), order("decode-1"))
    scene.turns(scene.driver)
    scene.fleet.reports["decode-0"] = replace(scene.fleet.reports["decode-0"], adopted=True)
    scene.fleet.reports["decode-1"] = replace(scene.fleet.reports["decode-1"], boot_id="")
    scene.turns(scene.driver)
    scene.driver.publish_gauges()
    for name, prefill, decode in (
        ("baton_wanted_workers", 1, 2),
        ("baton_registered_workers", 1, 1),
        ("baton_adopted_workers", 0, 1),
    ):
        assert value(name, role="prefill") == prefill, name
        assert value(name, role="decode") == decode, name
    assert (value("baton_ray_up"), value("baton_ray_nodes")) == (1, 3)


@pytest.mark.parametrize("hangs", [False, True])
def test_gauges_show_a_ray_that_does_not_answer(hangs: bool) -> None:
    scene = DriverScene(order("decode-0"))
    scene.turns(scene.driver)
    if hangs:  # in a turn that does not end
        scene.now += LOST_S
    else:
        scene.fleet.lost = True
        with pytest.raises(Unavailable):
            scene.driver.turn()
    scene.driver.publish_gauges()
    assert (value("baton_ray_up"), value("baton_ray_nodes")) == (0, 0)
    assert value("baton_registered_workers", role="decode") == 1  # it serves on
    scene.fleet.lost = False
    scene.turns(scene.driver)
    scene.driver.publish_gauges()
    assert value("baton_ray_up") == 1


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("ended", {"starts": 2}),
        ("role_changed", {}),
        ("moved", {"node": "10.0.0.9"}),
        ("replaced", {"order": order("decode-0", blocks="10")}),
    ],
)
def test_another_boot_of_a_worker_counts_with_its_reason(
    reason: str, changed: dict[str, object]
) -> None:
    scene = DriverScene(order("decode-0"))
    scene.turns(scene.driver, 2)
    first = scene.fleet.reports["decode-0"]
    scene.fleet.reports["decode-0"] = replace(first, boot_id="")  # between two boots
    scene.turns(scene.driver)
    before = value("baton_worker_restarts_total", reason=reason)
    total = sum(value("baton_worker_restarts_total", reason=each) for each in REASONS)
    scene.fleet.reports["decode-0"] = changed_report(first, boot_id="other", **changed)
    driver = scene.driver
    scene.turns(driver)
    assert value("baton_worker_restarts_total", reason=reason) == before + 1
    assert sum(value("baton_worker_restarts_total", reason=e) for e in REASONS) == total + 1
    scene.turns(driver)  # the same boot is counted once
    assert value("baton_worker_restarts_total", reason=reason) == before + 1
