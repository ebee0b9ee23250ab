"""Actors through a Ray that is scripted: what is asked of it, and how its failures are reported."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from baton.deploy.nodes.node_worker import WorkerReport
from baton.deploy.nodes.ray_fleet import NodeActor, RayFleet, namespace_of
from baton.deploy.nodes.worker_order import WorkerOrder
from baton.runtime.errors import Unavailable
from tests.support.json_values import Json, JsonObject

ORDER = WorkerOrder("decode-0", "decode", "baton", "", (), 60.0, cpus=2.0, gpus=1.0, by_role=True)


class RayError(Exception): ...


@dataclass
class Group:
    """A placement group, made with the options of Ray's function."""

    bundle_specs: list[dict[str, float]]
    strategy: str
    name: str
    lifetime: str
    _soft_target_node_id: str | None
    state: str = "CREATED"

    @property
    def target(self) -> str | None:
        return self._soft_target_node_id


def _in_group(group: Group, placement_group_bundle_index: int) -> tuple[Group, int]:
    return group, placement_group_bundle_index


class ScriptedRay:
    """What RayFleet uses of Ray. A question answers when its actor is in `answering`."""

    def __init__(self) -> None:
        self.options: list[dict[str, object]] = []
        self.named: list[str] = []
        self.killed: list[str] = []
        self.ended: list[str] = []
        self.answering: dict[str, object] = {}
        self.failure: Exception | None = None
        self.groups: list[Group] = []
        self.tables = 0  # how often all groups were listed
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.util = SimpleNamespace(
            list_named_actors=self._list,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=_in_group),
            placement_group=self._group,
            get_placement_group=self._get_group,
            remove_placement_group=self._remove_group,
            placement_group_table=self._table,
        )

    def living(self) -> list[str]:
        """Return the names of the groups that are there."""
        return [each.name for each in self.groups if each.state != "REMOVED"]

    def _group(self, bundles: list[dict[str, float]], **options: Json) -> Group:
        if options["name"] in self.living():
            raise ValueError("the name is taken")
        self.groups.append(Group(bundles, **options))
        return self.groups[-1]

    def _get_group(self, name: str) -> Group:
        for group in self.groups:
            if group.name == name and group.state != "REMOVED":
                return group
        raise ValueError("there is no such group")

    def _remove_group(self, group: Group) -> None:
        group.state = "REMOVED"

    def _table(self) -> dict[str, dict[str, str]]:
        self.tables += 1
        found = [{"name": each.name, "state": each.state} for each in self.groups]
        return {str(number): each for number, each in enumerate(found)}

    def _list(self) -> list[str]:
        if self.failure is not None:
            raise self.failure
        return list(self.named)

    def nodes(self) -> list[JsonObject]:
        addresses = {"n1": "10.0.0.1", "n2": "10.0.0.2"}
        return [
            {
                "Alive": name == "n2",
                "NodeManagerAddress": address,
                "NodeID": name,
                "Resources": {"CPU": 4.0},
            }  # fmt: skip
            for name, address in addresses.items()
        ]

    def remote(self, made: type) -> SimpleNamespace:
        assert made is NodeActor
        return SimpleNamespace(options=self._options)

    def _options(self, **options: object) -> SimpleNamespace:
        self.options.append(options)
        return SimpleNamespace(remote=lambda order: self._actor(order.worker_id))

    def _actor(self, name: str) -> SimpleNamespace:
        self.named = sorted({*self.named, name})
        return SimpleNamespace(
            name=name,
            report=SimpleNamespace(remote=lambda: f"question to {name}"),
            end=SimpleNamespace(remote=lambda: self.ended.append(name)),
        )

    def get_actor(self, name: str) -> SimpleNamespace:
        if name == "vanished":
            raise ValueError("there is no such actor")
        return self._actor(name)

    def wait(
        self, questions: list[str], num_returns: int, timeout: float
    ) -> tuple[list[str], list[str]]:
        done = [each for each in questions if each.split()[-1] in self.answering]
        return done, [each for each in questions if each not in done]

    def get(self, question: str) -> object:
        answer = self.answering[question.split()[-1]]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, actor: SimpleNamespace, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor.name)
        self.named.remove(actor.name)


def fleet_of(ray: ScriptedRay) -> RayFleet:
    return RayFleet(ray, "prod")


def test_actor_and_group_outlive_their_driver_and_their_node() -> None:
    ray = ScriptedRay()
    fleet_of(ray).make(replace(ORDER, ranks=2), None)
    (options,) = ray.options
    group, index = options.pop("scheduling_strategy")
    assert options == {
        "name": "decode-0",
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 1.0,
        "num_gpus": 1.0,
        "resources": {"baton-decode": 1.0},
    }
    assert index == 0 and group.bundle_specs[0].keys() == {"CPU", "GPU", "baton-decode"}
    assert group.bundle_specs[1:] == [{"CPU": 1.0}]
    assert (group.strategy, group.lifetime) == ("STRICT_PACK", "detached")
    assert group.name == "baton-prod/decode-0" and namespace_of("prod") == "baton-prod"


def test_ray_does_not_advise_against_the_group_of_an_actor() -> None:
    """Ray warns each time an actor is made; its other warnings are logged."""
    fleet_of(ScriptedRay())
    advice = "Scheduling a restartable detached actor with a placement group is not recommended"
    records = [logging.makeLogRecord({"msg": text}) for text in (advice, "another")]
    assert [bool(logging.getLogger("ray.actor").filter(each)) for each in records] == [False, True]


@pytest.mark.parametrize(
    ("host", "node"),
    [(None, None), ("10.0.0.2", "n2"), ("10.0.0.1", None), ("10.0.0.9", None)],  # n1 is lost
)
def test_a_group_is_made_on_the_chosen_node(host: str | None, node: str | None) -> None:
    ray = ScriptedRay()
    fleet_of(ray).make(ORDER, host)
    assert ray.groups[0].target == node


def test_a_group_that_lost_its_actor_is_used_again() -> None:
    """It holds the room in which the worker may run still; that of another size is replaced."""
    ray = ScriptedRay()
    fleet_of(ray).make(ORDER, None)
    fleet_of(ray).make(ORDER, "10.0.0.2")
    assert len(ray.groups) == 1 and ray.options[1]["scheduling_strategy"] == (ray.groups[0], 0)
    fleet_of(ray).make(replace(ORDER, cpus=3.0), None)
    assert [each.state for each in ray.groups] == ["REMOVED", "CREATED"]


def test_a_group_that_another_driver_makes_is_no_bug() -> None:
    ray = ScriptedRay()
    fleet_of(ray).make(ORDER, None)

    def none_yet(name: str) -> Group:
        raise ValueError(f"there is no {name}")

    ray.util.get_placement_group = none_yet
    with pytest.raises(Unavailable, match="no placement group baton-prod/decode-0: the name is"):
        fleet_of(ray).make(ORDER, None)


def test_a_removed_worker_leaves_no_group() -> None:
    ray = ScriptedRay()
    fleet = fleet_of(ray)
    fleet.make(ORDER, None)
    fleet.remove("decode-0")
    assert ray.killed == ["decode-0"] and ray.living() == []
    fleet.remove("decode-0")  # an actor of an earlier version has none


def test_groups_that_lost_their_actor_are_swept() -> None:
    ray = ScriptedRay()
    fleet = fleet_of(ray)
    for name in ("decode-0", "decode-1", "decode-2"):
        fleet.make(replace(ORDER, worker_id=name), None)
    RayFleet(ray, "other").make(ORDER, None)
    ray.named = ["decode-0"]  # the others are lost without this driver
    fleet.names()
    fleet.sweep({"decode-1"})
    assert ray.living() == ["baton-prod/decode-0", "baton-prod/decode-1", "baton-other/decode-0"]
    fleet.sweep({"decode-1"})
    assert ray.tables == 1, "nothing has changed since"
    fleet.sweep(())
    assert ray.living() == ["baton-prod/decode-0", "baton-other/decode-0"]


def test_rooms_are_those_of_living_nodes() -> None:
    assert fleet_of(ScriptedRay()).rooms() == {"10.0.0.2": {"CPU": 4.0}}


def test_actors_of_an_earlier_driver_are_found_by_name() -> None:
    ray = ScriptedRay()
    ray.named = ["decode-0", "vanished"]
    fleet = fleet_of(ray)
    assert fleet.names() == {"decode-0", "vanished"}
    ray.answering = {"decode-0": WorkerReport(ORDER, "10.0.0.2")}
    assert fleet.ask() == {"decode-0": WorkerReport(ORDER, "10.0.0.2")}
    fleet.end("decode-0")
    fleet.remove("decode-0")
    fleet.end("vanished")
    fleet.remove("vanished")
    assert (ray.ended, ray.killed) == (["decode-0"], ["decode-0"])


def test_a_silent_actor_is_asked_once_and_heard_later() -> None:
    ray = ScriptedRay()
    fleet = fleet_of(ray)
    fleet.make(ORDER, None)
    fleet.make(replace(ORDER, worker_id="decode-1"), "")
    report = WorkerReport(ORDER, "10.0.0.2")
    ray.answering = {"decode-0": report}
    assert fleet.ask() == fleet.ask() == {"decode-0": report}
    ray.answering = {"decode-0": RayError("its node died"), "decode-1": report}
    assert fleet.ask() == {"decode-1": report}
    assert fleet_of(ray).ask() == {}


def test_a_ray_that_fails_is_unavailable() -> None:
    ray = ScriptedRay()
    ray.failure = RayError("GCS is\n lost")
    with pytest.raises(Unavailable, match="Ray does not answer: GCS is lost"):
        fleet_of(ray).names()


def test_an_actor_reports_that_its_node_lacks_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.delenv("BATON_TOKEN", raising=False)
    actor = NodeActor(replace(ORDER, settings=(("registry.location", "redis://db"),)))
    assert actor.report().state == "failed" and "BATON_TOKEN is not set" in actor.report().message
    actor.end()
