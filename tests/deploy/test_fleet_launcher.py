"""`baton serve` on all nodes of Ray: a router here, and a driver of `baton fleet`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.deploy.cli.main import parser
from baton.deploy.cli.serve_commands import _serve_options
from baton.deploy.control.orders import live_clusters
from baton.deploy.host.fleet_end import DRIVER_END_S
from baton.deploy.host.instance import TOKEN_KEY, Instance, read_job
from baton.deploy.nodes.fleet_plan import FleetOptions
from baton.deploy.serve.fleet_launcher import FleetLauncher, fleet_command
from baton.deploy.serve.model_source import ModelSource
from baton.deploy.serve.plan import FLEET_JOB, ServeOptions, client_settings, grace_s, jobs
from baton.runtime.cluster_config import RegistryConfig
from baton.runtime.errors import ConfigError
from baton.runtime.settings.loading import load

SERVE = ("serve", "--ray-address", "10.0.0.1:6379", "--registry", "redis://db:6379/0")
PLAIN = ("--set", "security.tls=off")
MODEL = ModelSource(Path("/models/m"), "m")


def options(*given: str) -> ServeOptions:
    found: ServeOptions = _serve_options(parser().parse_args([*SERVE, *PLAIN, *given]))
    return found


def fleet_of(command: tuple[str, ...]) -> FleetOptions:
    """Return what the driver reads from its command line."""
    given = parser().parse_args(command[command.index("fleet") :])
    settings = dict(each.split("=", 1) for each in given.set)
    settings["registry.location"] = given.registry
    fleet = FleetOptions(
        config=load(None, {}, settings), settings=settings, prefill=given.prefill,
        decode=given.decode, model=given.model, cpus=given.cpus, gpus=given.gpus,
    )  # fmt: skip
    fleet.check()
    return fleet


def test_the_router_stays_and_workers_go_to_the_driver(tmp_path: Path) -> None:
    serve = options("--prefill", "2", "--decode", "3", "--tp", "2", "--set", "pool.blocks=9")
    serve.check()
    (router,) = jobs(serve, MODEL, tmp_path)
    assert router.argv[router.argv.index("--registry") + 1] == "redis://db:6379/0"
    orders = fleet_of(fleet_command(serve, MODEL)).orders()
    assert [each.worker_id for each in orders] == [
        "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"
    ]  # fmt: skip
    assert {each.model for each in orders} == {"/models/m"}
    assert {(each.cpus, each.gpus, each.ranks) for each in orders} == {(2, 0, 2)}
    assert dict(orders[0].settings)["pool.blocks"] == "9"


def test_workers_are_spread_unless_they_are_packed() -> None:
    assert "--pack" not in fleet_command(options(), MODEL)
    packed = fleet_command(options("--pack"), MODEL)
    assert parser().parse_args(packed[packed.index("fleet") :]).pack


def test_pack_without_other_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="--pack is given.*--ray-address and --registry"):
        _serve_options(parser().parse_args(["serve", "--pack"])).check()


def test_commands_of_this_host_find_the_workers_of_other_nodes(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_REGISTRY__PASSWORD", "of-redis")
    serve = options("--set", "registry.cluster=blue")
    instance.write_environment({TOKEN_KEY: "a token"})
    instance.write_client_settings(client_settings(serve, instance.folder))
    (found,) = live_clusters(instance.folder.name)
    assert found.registry == RegistryConfig("redis://db:6379/0", "of-redis", cluster="blue")
    assert (found.secrets.token, found.security.tls) == ("a token", "off")


def test_gpus_are_those_of_all_ranks() -> None:
    serve = options("--device", "cuda", "--tp", "2")
    assert {each.gpus for each in fleet_of(fleet_command(serve, MODEL)).orders()} == {2}


def test_the_embedded_model_is_that_of_each_node() -> None:
    embedded = replace(MODEL, demonstration=True)
    (order, _) = fleet_of(fleet_command(options(), embedded)).orders()
    assert order.model == "" and int(dict(order.settings)["pool.blocks"]) > 0


def test_settings_of_the_router_alone_stay_here() -> None:
    command = fleet_command(options("--set", "router.api_keys=a-secret-of-clients"), MODEL)
    assert "a-secret-of-clients" not in " ".join(command)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--config", "baton.toml"), "--config baton.toml is a file of this host.*--set"),
        (("--decode-tp", "2"), "--decode-tp is for workers of this host.*baton fleet --by-role"),
        (("--set", "security.tls=on"), "security.certificate is not set.*baton authority issue"),
    ],
)
def test_what_nodes_cannot_have_is_refused(
    given: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "baton.toml").touch()
    with pytest.raises(ConfigError, match=words):
        options(*given).check()


def test_a_password_of_the_environment_reaches_no_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_REGISTRY__LOCATION", "redis://:hunter2@db:6379/0")
    serve = _serve_options(parser().parse_args([*SERVE[:3], *PLAIN]))
    with pytest.raises(ConfigError, match="set BATON_REGISTRY__PASSWORD") as refused:
        serve.check()
    assert "hunter2" not in str(refused.value)


def test_a_token_of_this_host_alone_is_refused(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATON_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="BATON_TOKEN is not set.*each node"):
        FleetLauncher(instance, options(), MODEL)
    monkeypatch.setenv("BATON_TOKEN", "a token")
    FleetLauncher(instance, options(), MODEL)
    job = read_job(instance.folder, FLEET_JOB)
    assert job is not None and job.argv == fleet_command(options(), MODEL)
    assert job.grace_s == grace_s(options().config) + DRIVER_END_S


def test_workers_stay_on_this_host_without_a_server(tmp_path: Path) -> None:
    serve = _serve_options(parser().parse_args(["serve", "--ray-address", "10.0.0.1:6379"]))
    serve.check()
    assert len(jobs(serve, MODEL, tmp_path)) == 3


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "--registry", "redis://db:6379/0"),
        (*SERVE, "--launcher", "process"),
        ("serve", "--ray-address", "10.0.0.1:6379", "--registry", "/run/registry"),
    ],
)
def test_a_registry_without_other_nodes_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--registry.*--ray-address.*baton worker"):
        _serve_options(parser().parse_args(list(command))).check()
