"""What `baton fleet` asks of the nodes, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from baton.deploy.cli.main import parser
from baton.deploy.nodes.fleet_plan import FleetOptions
from baton.deploy.nodes.worker_order import WorkerOrder, node_settings, worker_command
from baton.runtime.errors import ConfigError
from baton.runtime.settings.loading import load

REDIS = {"registry.location": "redis://db:6379/0"}


def options(settings: Mapping[str, str] = REDIS, **given: Any) -> FleetOptions:
    return FleetOptions(config=load(None, {}, settings), settings=settings, **given)


def test_each_worker_has_an_order_with_the_settings() -> None:
    fleet = options(REDIS | {"pool.blocks": "9"}, prefill=1, decode=2, gpus=1, by_role=True)
    fleet.check()
    orders = fleet.orders()
    assert [order.worker_id for order in orders] == ["prefill-0", "decode-0", "decode-1"]
    assert [order.resources() for order in orders] == [
        {"baton-prefill": 1.0},
        {"baton-decode": 1.0},
        {"baton-decode": 1.0},
    ]
    assert dict(orders[1].settings) == REDIS | {
        "pool.blocks": "9",
        "registry.cluster": "baton",
        "worker.device": "cuda",
    }
    assert orders[0].needs() == "CPU 1, GPU 1, baton-prefill 1"
    assert replace(fleet, by_role=False).orders()[0].resources() == {}
    grouped = replace(fleet, group="code").orders()
    assert [*grouped[0].resources(), *grouped[1].resources()] == [
        "baton-code-prefill", "baton-code-decode"
    ]  # fmt: skip


def test_a_group_without_roles_takes_workers_of_both() -> None:
    fleet = options(group="code-worker")
    fleet.check()
    assert [each.resources() for each in fleet.orders()] == [{"baton-code-worker": 1.0}] * 2


@pytest.mark.parametrize("group", ["prefill", "code-decode"])
def test_a_group_is_not_named_like_a_role(group: str) -> None:
    with pytest.raises(ConfigError, match=f"--group {group} names the resource of the"):
        options(group=group).check()
    by_role = options(group=group, by_role=True)  # of any other name: baton-GROUP-ROLE
    by_role.check()
    for name in ("", "codeprefill", "prefill-workers"):
        options(group=name).check()


def test_an_order_of_an_earlier_version_is_read() -> None:
    (order,) = options(prefill=0, cpus=3).orders()
    assert copy.copy(order) == order
    earlier = WorkerOrder.__new__(WorkerOrder)
    earlier.__setstate__([getattr(order, each.name) for each in fields(order)][:-1])
    assert earlier == order


def test_roles_may_have_unlike_gpus() -> None:
    prefill, decode = options(gpus=2, prefill_gpus=0).orders()
    assert (prefill.gpus, decode.gpus) == (0, 2)
    assert "worker.device" not in dict(prefill.settings)
    assert dict(decode.settings)["worker.device"] == "cuda"


def test_the_ranks_of_a_worker_get_their_cores_on_one_node() -> None:
    """One bundle for each rank, all of one STRICT_PACK group."""
    (order,) = options(REDIS | {"worker.tp": "3"}, prefill=0, cpus=2).orders()
    assert (order.cpus, order.ranks, order.needs()) == (6, 3, "CPU 6")
    assert order.bundles() == [{"CPU": 2.0}] * 3
    more = replace(order, gpus=3.0, by_role=True).bundles()
    assert more == [{"CPU": 2.0, "GPU": 3.0, "baton-decode": 1.0}, {"CPU": 2.0}, {"CPU": 2.0}]
    assert replace(order, cpus=0.0, ranks=2).bundles() == [{"memory": 1.0}] * 2, "Ray takes no {}"


@pytest.mark.parametrize(
    ("settings", "environ", "threads"),
    [
        ({}, {"OMP_NUM_THREADS": "2"}, "6"),  # Ray's: those of the actor's bundle
        ({}, {"OMP_NUM_THREADS": "5"}, None),  # the node's own
        ({}, {"OMP_NUM_THREADS": "2", "BATON_WORKER__THREADS": "4"}, None),
        ({"worker.threads": "4"}, {"OMP_NUM_THREADS": "2"}, "4"),
    ],
)
def test_ranks_share_the_cores_that_ray_reserves(
    settings: dict[str, str], environ: dict[str, str], threads: str | None
) -> None:
    (order,) = options(REDIS | {"worker.tp": "3"} | settings, prefill=0, cpus=2).orders()
    assert node_settings(order, "10.0.0.7", environ).get("worker.threads") == threads


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        ({"registry.location": "/run/registry"}, {}, "registry.location is the folder .*redis://"),
        ({"registry.location": "redis://:secret@db"}, {}, "BATON_REGISTRY__PASSWORD"),
        ({"registry.location": "redis://:secret[@db"}, {}, "no URL of a server"),
        (REDIS | {"registry.password": "secret"}, {}, "registry.password is a secret"),
        (REDIS | {"router.api_keys": "secret-secret"}, {}, "router.api_keys is a secret"),
        (REDIS | {"worker.port": "9000"}, {}, "set BATON_WORKER__PORT in the environment"),
        (
            REDIS | {"worker.device": "cuda"},
            {},
            "worker.device is cuda, and prefill workers have --gpus 0",
        ),
        (REDIS | {"worker.device": "cuda:1"}, {"gpus": 1}, "Ray chooses the GPUs"),
        (
            REDIS | {"worker.device": "cpu"},
            {"gpus": 1},
            "worker.device is cpu, and prefill workers have --gpus 1",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    settings: dict[str, str], given: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        options(settings, **given).check()
    assert "secret-secret" not in str(caught.value) and ":secret" not in str(caught.value)


def test_a_worker_takes_its_address_from_its_node() -> None:
    (order,) = options(prefill=0).orders()
    assert node_settings(order, "10.0.0.7", {})["worker.host"] == "10.0.0.7"
    bound = {"BATON_WORKER__HOST": "0.0.0.0"}
    assert node_settings(order, "10.0.0.7", bound)["worker.advertise"] == "10.0.0.7"
    named = bound | {"BATON_WORKER__ADVERTISE": "eth1"}
    assert not {"worker.host", "worker.advertise"} & set(node_settings(order, "10.0.0.7", named))


def test_the_command_line_accepts_the_command_of_a_worker() -> None:
    (order,) = options(prefill=0).orders()
    command = worker_command(order, Path("/models/m"), node_settings(order, "10.0.0.7", {}))
    parsed = parser().parse_args(list(command[command.index("worker") :]))
    assert (parsed.role, parsed.worker_id, parsed.model) == (
        "decode",
        "decode-0",
        Path("/models/m"),
    )
    assert "worker.host=10.0.0.7" in parsed.set and "registry.cluster=baton" in parsed.set


def test_an_order_carries_no_secret_of_the_drivers_environment() -> None:
    """Only what stands on the command line is sent to the nodes."""
    environ = {"BATON_TOKEN": "a-token", "BATON_REGISTRY__PASSWORD": "a-password"}
    fleet = FleetOptions(config=load(None, environ, REDIS), settings=REDIS)
    fleet.check()
    assert all("a-token" not in str(e) and "a-password" not in str(e) for e in fleet.orders())
    assert all(isinstance(order, WorkerOrder) for order in fleet.orders())
