"""Jobs, commands and environment of an instance, from its options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.deploy.serve.flag_values import NO_ADMIN
from baton.deploy.serve.model_source import ModelSource
from baton.deploy.serve.plan import (
    LauncherName,
    ServeOptions,
    client_settings,
    devices,
    environment,
    gpus_of_actors,
    grace_s,
    jobs,
    makes_certificates,
    worker_names,
    workers_per_gpu,
)
from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.config import Config, HandoffConfig, PoolConfig, RouterConfig, WorkerConfig
from baton.runtime.errors import ConfigError
from baton.runtime.settings.loading import load

MODEL = ModelSource(Path("/m"), "name")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ServeOptions(Config(), prefill=-1), "--prefill is -1"),
        (ServeOptions(Config(), decode=65), "--decode is 65"),
        (ServeOptions(Config(), decode=0), "--decode is 0"),
        (ServeOptions(Config(), start_timeout_s=float("nan")), "--start-timeout is nan"),
        (ServeOptions(Config(), start_timeout_s=-1.0), "--start-timeout is -1"),
        (
            ServeOptions(Config(router=RouterConfig(placement="disaggregated")), prefill=0),
            "needs --prefill 1",
        ),
    ],
)
def test_counts_that_cannot_serve_are_refused(options: ServeOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options.check()


def test_under_ray_the_user_names_no_gpu() -> None:
    config = Config(worker=WorkerConfig(device="cuda:1"))
    with pytest.raises(ConfigError, match="cuda:1, and Ray chooses.*--launcher process"):
        ServeOptions(config).check()
    ServeOptions(config, launcher="process").check()


def test_no_prefill_worker_is_fine_where_placement_may_be_local() -> None:
    options = ServeOptions(Config(), prefill=0, decode=2)
    options.check()
    assert worker_names(options) == ["decode-0", "decode-1"]


def test_workers_get_roles_and_share_model_and_registry(tmp_path: Path) -> None:
    options = ServeOptions(Config(), prefill=2, decode=1, config_file=tmp_path / "b.toml")
    planned = {job.name: " ".join(job.argv) for job in jobs(options, MODEL, tmp_path)}
    assert list(planned) == ["router", "prefill-0", "prefill-1", "decode-0"]
    assert "worker --role prefill --worker-id prefill-1 " in planned["prefill-1"]
    assert "worker --role decode --worker-id decode-0 " in planned["decode-0"]
    assert "router --model-name name " in planned["router"]
    assert "--admin-port 0" in planned["router"] and "--admin-port" not in planned["decode-0"]
    closed, *_ = jobs(replace(options, admin_port=NO_ADMIN), MODEL, tmp_path)
    assert "--admin-port" not in closed.argv
    for command in planned.values():
        assert f"--model /m --registry {tmp_path}/registry" in command
        assert f"--config {tmp_path}/b.toml" in command


def test_flags_reach_the_children_as_environment_and_secrets_too() -> None:
    options = ServeOptions(Config(), flags={"router.api_keys": "k", "pool.blocks": "8"})
    added = environment(options, "secret", 2, {})
    assert added["BATON_ROUTER__API_KEYS"] == "k"
    assert added["BATON_POOL__BLOCKS"] == "8"
    assert added["BATON_TOKEN"] == "secret"
    commands = [word for job in jobs(options, MODEL, Path("/f")) for word in job.argv]
    assert "k" not in commands and "secret" not in commands


@pytest.mark.parametrize(
    ("workers", "cores", "threads", "spin"),
    [((1, 1), 2, "1", "10000"), ((1, 2), 12, "4", "10000"), ((4, 4), 2, "1", "0")],
)
def test_cores_are_divided_among_the_workers(
    workers: tuple[int, int], cores: int, threads: str, spin: str
) -> None:
    options = ServeOptions(Config(), prefill=workers[0], decode=workers[1])
    added = environment(options, "t", cores, {})
    assert added["OMP_NUM_THREADS"] == threads
    assert (added["OMP_WAIT_POLICY"], added["GOMP_SPINCOUNT"]) == ("passive", spin)


def test_the_users_own_thread_count_wins() -> None:
    assert "OMP_NUM_THREADS" not in environment(
        ServeOptions(Config()), "t", 8, {"OMP_NUM_THREADS": "3"}
    )
    configured = ServeOptions(Config(worker=WorkerConfig(threads=3)))
    added = environment(configured, "t", 8, {})
    assert "OMP_NUM_THREADS" not in added
    assert added["GOMP_SPINCOUNT"] == "0"  # they may be more than the cores


@pytest.mark.parametrize(
    ("model", "blocks", "expected"),
    [
        (None, 0, {"BATON_POOL__BLOCKS": "2048"}),
        ("folder", 0, {"BATON_POOL__MEMORY_FRACTION": "0.125"}),
        ("folder", 77, {}),
        (None, 77, {}),
    ],
)
def test_the_hosts_memory_is_divided_unless_the_pool_is_given(
    model: str | None, blocks: int, expected: dict[str, str]
) -> None:
    config = Config(pool=PoolConfig(blocks=blocks))
    added = environment(ServeOptions(config, prefill=1, decode=3, model=model), "t", 2, {})
    assert {name: text for name, text in added.items() if "POOL" in name} == expected


def on(device: str, prefill: int, decode: int, launcher: LauncherName = "process") -> ServeOptions:
    config = Config(worker=WorkerConfig(device=device), pool=PoolConfig(memory_fraction=0.8))
    return ServeOptions(config, prefill=prefill, decode=decode, model="m", launcher=launcher)


def test_each_role_has_its_own_number_of_ranks() -> None:
    options = ServeOptions(Config(), prefill=1, decode=1, prefill_tp=2)
    planned = {job.name: " ".join(job.argv) for job in jobs(options, MODEL, Path("/f"))}
    assert "--set worker.tp=2" in planned["prefill-0"]
    assert "worker.tp" not in planned["decode-0"]  # from file, environment or flag


def test_each_role_has_its_own_kv_dtype() -> None:
    options = ServeOptions(Config(), prefill=1, decode=1, decode_kv_dtype="int8")
    planned = {job.name: " ".join(job.argv) for job in jobs(options, MODEL, Path("/f"))}
    assert "--set pool.kv_dtype=int8" in planned["decode-0"]
    assert "pool.kv_dtype" not in planned["prefill-0"]


def test_each_role_has_its_own_groups_of_experts() -> None:
    config = Config(worker=WorkerConfig(tp=4, ep=2))
    options = ServeOptions(config, prefill_ep=4, decode_tp=2)
    options.check()
    planned = {job.name: " ".join(job.argv) for job in jobs(options, MODEL, Path("/f"))}
    assert "--set worker.ep=4" in planned["prefill-0"] and "worker.tp" not in planned["prefill-0"]
    assert "--set worker.tp=2" in planned["decode-0"] and "worker.ep" not in planned["decode-0"]


def test_groups_that_ranks_cannot_form_are_named() -> None:
    options = ServeOptions(Config(worker=WorkerConfig(tp=4, ep=4)), decode_tp=2)
    with pytest.raises(ConfigError, match="decode workers: worker.ep is 4 and worker.tp 2: .*-ep"):
        options.check()


@pytest.mark.parametrize(
    ("device", "gpus", "counts", "wanted", "sharing"),
    [
        ("auto", 0, (1, 1), [], 0),
        ("cpu", 4, (1, 1), [], 0),
        ("auto", 2, (1, 1), ["cuda:0", "cuda:1"], 1),
        ("auto", 8, (1, 1), ["cuda:0", "cuda:1"], 1),
        ("cuda", 2, (1, 3), ["cuda:0", "cuda:1", "cuda:0", "cuda:1"], 2),
        ("cuda", 1, (1, 2), ["cuda:0"] * 3, 3),
        ("auto", 3, (2, 2), ["cuda:0", "cuda:1", "cuda:2", "cuda:0"], 2),
        ("cuda:1", 4, (1, 1), ["cuda:1", "cuda:1"], 2),
    ],
)
def test_workers_go_round_the_gpus(
    device: str, gpus: int, counts: tuple[int, int], wanted: list[str], sharing: int
) -> None:
    options = on(device, *counts)
    found = devices(options, gpus)
    assert list(found) == (worker_names(options) if wanted else [])
    assert list(found.values()) == wanted
    assert workers_per_gpu(options, gpus) == sharing
    if wanted:
        assert max(wanted.count(each) for each in wanted) == sharing
    planned = {job.name: " ".join(job.argv) for job in jobs(options, MODEL, Path("/f"), gpus)}
    for name in worker_names(options):
        asked = f"--set worker.device={found[name]}" if wanted else "--set worker"
        assert (asked in planned[name]) == bool(wanted)
    assert "--set worker" not in planned["router"]


@pytest.mark.parametrize(
    ("tp", "gpus", "wanted", "sharing"),
    [
        ((2, 1), 4, ["cuda:0", "cuda:2", "cuda:3"], 1),  # one prefill, two decode workers
        ((1, 2), 8, ["cuda:0", "cuda:1", "cuda:3"], 1),
        ((4, 2), 4, ["cuda:0", "cuda:0", "cuda:2"], 2),
        ((2, 2), 3, ["cuda:0", "cuda:0", "cuda:0"], 2),  # no pair of neighbours is left
    ],
)
def test_ranks_have_gpus_that_follow_each_other(
    tp: tuple[int, int], gpus: int, wanted: list[str], sharing: int
) -> None:
    options = replace(on("cuda", 1, 2), prefill_tp=tp[0], decode_tp=tp[1])
    assert list(devices(options, gpus).values()) == wanted
    assert workers_per_gpu(options, gpus) == sharing


def test_ranks_without_gpus_of_their_own_are_refused() -> None:
    options = replace(on("cuda", 1, 1), decode_tp=4)
    with pytest.raises(ConfigError, match="worker.tp is 4, and torch sees 2 GPUs.*at most 2"):
        devices(options, 2)
    with pytest.raises(ConfigError, match="Ray has 4 GPUs for the ranks of all workers.*fewer"):
        devices(replace(options, launcher="ray"), 4)


def test_ray_chooses_the_gpus_and_the_worker_takes_what_it_sees() -> None:
    found = devices(on("auto", 1, 3, "ray"), 2)
    assert set(found.values()) == {"cuda"} and len(found) == 4
    assert devices(on("auto", 1, 3, "ray"), 0) == {}
    ranked = replace(on("auto", 1, 1, "ray"), decode_tp=4)
    assert devices(ranked, 5) == {"prefill-0": "cuda", "decode-0": "cuda"}


@pytest.mark.parametrize(
    ("tp", "gpus", "wanted"),
    [
        ((1, 1), 2, [1.0, 1.0]),
        ((1, 1), 1, [0.5, 0.5]),
        ((2, 4), 8, [2.0, 4.0]),
        ((2, 4), 0, [0.0, 0.0]),
    ],
)
def test_an_actor_asks_for_the_gpus_of_all_ranks(
    tp: tuple[int, int], gpus: int, wanted: list[float]
) -> None:
    options = replace(on("auto", 1, 1, "ray"), prefill_tp=tp[0], decode_tp=tp[1])
    assert list(gpus_of_actors(options, gpus).values()) == wanted


@pytest.mark.parametrize("workers", [3, 7, 128])
def test_as_many_workers_as_planned_fit_on_a_gpu(workers: int) -> None:
    assert sum(gpus_of_actors(on("auto", 1, workers - 1, "ray"), 1).values()) <= 1.0


@pytest.mark.parametrize(
    ("device", "gpus", "fraction"),
    [("auto", 0, 0.2), ("auto", 4, 0.8), ("auto", 2, 0.4), ("cuda:0", 2, 0.2), ("cpu", 2, 0.2)],
)
def test_memory_is_divided_among_those_that_share_it(
    device: str, gpus: int, fraction: float
) -> None:
    added = environment(on(device, 1, 3), "t", 2, {}, gpus)
    assert float(added["BATON_POOL__MEMORY_FRACTION"]) == pytest.approx(fraction)


@pytest.mark.parametrize(
    ("device", "flags", "inherited", "fraction"),
    [
        ("auto", {}, {}, 0.9),
        ("cpu", {}, {}, 0.5),
        ("auto", {"pool.memory_fraction": "0.5"}, {}, 0.5),
        ("auto", {}, {"BATON_POOL__MEMORY_FRACTION": "0.5"}, 0.5),
    ],
)
def test_memory_fraction_defaults_to_the_devices_own(
    device: str, flags: dict[str, str], inherited: dict[str, str], fraction: float
) -> None:
    config = Config(worker=WorkerConfig(device=device))
    options = ServeOptions(config, prefill=1, decode=1, model="m", flags=flags)
    added = environment(options, "t", 2, inherited, gpus=1)
    assert float(added["BATON_POOL__MEMORY_FRACTION"]) == pytest.approx(fraction / 2)


def test_a_worker_is_not_killed_in_its_drain_or_lease(tmp_path: Path) -> None:
    config = Config(worker=WorkerConfig(drain_s=100.0), handoff=HandoffConfig(lease_s=7.0))
    router, *workers = jobs(ServeOptions(config), MODEL, tmp_path)
    assert {job.grace_s for job in workers} == {grace_s(config)} and grace_s(config) >= 100 + 14


@pytest.mark.parametrize("router", [RouterConfig(), RouterConfig(leave_s=7.0, drain_s=900.0)])
def test_a_router_is_not_killed_while_its_streams_end(tmp_path: Path, router: RouterConfig) -> None:
    job, *_ = jobs(ServeOptions(Config(router=router)), MODEL, tmp_path)
    assert job.grace_s >= router.leave_s + router.drain_s + 10  # and are told of the end


def test_each_process_gets_a_certificate_of_its_own(tmp_path: Path) -> None:
    assert makes_certificates(ServeOptions(Config()))
    for job in jobs(ServeOptions(Config()), MODEL, tmp_path):
        command = " ".join(job.argv)
        assert f"--set security.authority={tmp_path}/tls/authority.pem " in command
        assert f"--set security.certificate={tmp_path}/tls/{job.name}.pem " in command
        assert f"--set security.key={tmp_path}/tls/{job.name}.key" in command


@pytest.mark.parametrize(
    "security", [SecurityConfig(tls="off"), SecurityConfig("on", "/a.pem", "/c.pem", "/k.pem")]
)
def test_none_is_made_where_tls_is_off_or_the_user_has_some(
    tmp_path: Path, security: SecurityConfig
) -> None:
    options = ServeOptions(Config(security=security))
    assert not makes_certificates(options)
    assert not any(
        "security." in word for job in jobs(options, MODEL, tmp_path) for word in job.argv
    )


def test_commands_call_workers_with_a_certificate_of_their_own(tmp_path: Path) -> None:
    found = load(None, {}, client_settings(ServeOptions(Config()), tmp_path)).security
    tls = tmp_path / "tls"
    expected = (tls / "authority.pem", tls / "client.pem", tls / "client.key")
    assert (found.authority, found.certificate, found.key) == tuple(map(str, expected))


def test_commands_use_the_users_files_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = SecurityConfig("on", "a.pem", "c.pem", "k.pem", "workers.example")
    found = load(None, {}, client_settings(ServeOptions(Config(security=own)), tmp_path)).security
    files = [str(tmp_path / name) for name in ("a.pem", "c.pem", "k.pem")]
    assert found == SecurityConfig("on", *files, "workers.example")
    off = ServeOptions(Config(security=SecurityConfig(tls="off")))
    assert load(None, {}, client_settings(off, tmp_path)).security.tls == "off"
