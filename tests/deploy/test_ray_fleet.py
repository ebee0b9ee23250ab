"""Actors through a Ray that is scripted: what is asked of it, and how its failures are reported."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from baton.deploy.nodes.node_choice import NodeChoice
from baton.deploy.nodes.node_worker import WorkerReport
from baton.deploy.nodes.ray_fleet import NodeActor, RayFleet, namespace_of
from baton.deploy.nodes.worker_order import WorkerOrder
from baton.runtime.errors import Unavailable
from tests.support.json_values import JsonObject

ORDER = WorkerOrder("decode-0", "decode", "baton", "", (), 60.0, cpus=2.0, gpus=1.0, by_role=True)


class RayError(Exception): ...


def _affinity(node: str, soft: bool, _spill_on_unavailable: bool) -> tuple[str, bool, bool]:
    return node, soft, _spill_on_unavailable


class ScriptedRay:
    """What RayFleet uses of Ray. A question answers when its actor is in `answering`."""

    def __init__(self) -> None:
        self.options: list[dict[str, object]] = []
        self.named: list[str] = []
        self.killed: list[str] = []
        self.ended: list[str] = []
        self.answering: dict[str, object] = {}
        self.failure: Exception | None = None
        self.exceptions = SimpleNamespace(RayError=RayError)
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=_affinity)
        self.util = SimpleNamespace(list_named_actors=self._list, scheduling_strategies=strategies)

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


def test_an_actor_outlives_its_driver_and_its_node() -> None:
    ray = ScriptedRay()
    RayFleet(ray, pack=False).make(ORDER, NodeChoice())
    assert ray.options == [
        {
            "name": "decode-0",
            "get_if_exists": True,
            "lifetime": "detached",
            "max_restarts": -1,
            "num_cpus": 2.0,
            "num_gpus": 1.0,
            "resources": {"baton-decode": 1.0},
            "scheduling_strategy": "SPREAD",
        }
    ]
    assert namespace_of("prod") == "baton-prod"


@pytest.mark.parametrize(
    ("pack", "node", "strategy"),
    [
        (False, NodeChoice(), "SPREAD"),
        (True, NodeChoice(), "DEFAULT"),
        (False, NodeChoice("10.0.0.2", waits=True), ("n2", True, False)),
        (False, NodeChoice("10.0.0.2"), ("n2", True, True)),
        (True, NodeChoice("10.0.0.1", waits=True), "DEFAULT"),  # that node is lost
        (False, NodeChoice("10.0.0.9"), "SPREAD"),
    ],
)
def test_an_actor_is_made_on_the_chosen_node(
    pack: bool, node: NodeChoice, strategy: str | tuple[str, bool, bool]
) -> None:
    ray = ScriptedRay()
    RayFleet(ray, pack=pack).make(ORDER, node)
    assert ray.options[0]["scheduling_strategy"] == strategy


def test_rooms_are_those_of_living_nodes_unless_they_are_packed() -> None:
    assert RayFleet(ScriptedRay(), pack=False).rooms() == {"10.0.0.2": {"CPU": 4.0}}
    assert RayFleet(ScriptedRay(), pack=True).rooms() == {}


def test_actors_of_an_earlier_driver_are_found_by_name() -> None:
    ray = ScriptedRay()
    ray.named = ["decode-0", "vanished"]
    fleet = RayFleet(ray, pack=False)
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
    fleet = RayFleet(ray, pack=False)
    fleet.make(ORDER, NodeChoice())
    fleet.make(replace(ORDER, worker_id="decode-1"), NodeChoice())
    report = WorkerReport(ORDER, "10.0.0.2")
    ray.answering = {"decode-0": report}
    assert fleet.ask() == fleet.ask() == {"decode-0": report}
    ray.answering = {"decode-0": RayError("its node died"), "decode-1": report}
    assert fleet.ask() == {"decode-1": report}
    assert RayFleet(ray, pack=False).ask() == {}


def test_a_ray_that_fails_is_unavailable() -> None:
    ray = ScriptedRay()
    ray.failure = RayError("GCS is\n lost")
    with pytest.raises(Unavailable, match="Ray does not answer: GCS is lost"):
        RayFleet(ray, pack=False).names()


def test_an_actor_reports_that_its_node_lacks_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.delenv("BATON_TOKEN", raising=False)
    actor = NodeActor(replace(ORDER, settings=(("registry.location", "redis://db"),)))
    assert actor.report().state == "failed" and "BATON_TOKEN is not set" in actor.report().message
    actor.end()
