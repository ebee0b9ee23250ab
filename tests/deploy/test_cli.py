"""The command line: fast help, one clear line per mistake, settings from options."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from baton.deploy.cli import main
from baton.deploy.cli.arguments import flags_of
from baton.deploy.host.restarts import CONFIG_EXIT
from baton.runtime.errors import ConfigError
from baton.runtime.settings.loading import load
from tests.support.command_parsers import commands, helps_of
from tests.support.machine_speed import slowness

COMMANDS = main.COMMANDS


def baton(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "baton.deploy.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=250 * slowness(),
        env={k: v for k, v in os.environ.items() if k != "BATON_TOKEN"} | environment,
    )


def test_help_names_every_command() -> None:
    done = baton("--help")
    assert done.returncode == 0
    assert [name for name in COMMANDS if f"\n    {name}" not in done.stdout] == []
    assert sorted(commands()) == sorted(COMMANDS)


def test_no_command_prints_the_help() -> None:
    done = baton()
    assert done.returncode == 0 and done.stdout == baton("--help").stdout


@pytest.mark.parametrize(
    ("given", "hint"),
    [("chta", "did you mean `baton chat`?"), ("xyzzy", "`baton --help` lists the commands")],
)
def test_an_unknown_command_names_the_nearest(
    capsys: pytest.CaptureFixture[str], given: str, hint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([given])
    assert ended.value.code == 2
    assert f"there is no command '{given}': {hint}" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([command, "--help"])
    assert ended.value.code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_each_flag_is_explained(command: str) -> None:
    parser = commands()[command]
    assert parser.description
    reported = helps_of(parser)
    assert [name for name, words in reported.items() if not words] == []


def test_the_demo_reports_its_actual_placement() -> None:
    known = commands()
    for name, default in (("serve", "auto"), ("demo", "disaggregated")):
        reported = " ".join(known[name].format_help().split())
        assert f"(router.placement; default: {default})" in reported


def test_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert capsys.readouterr().out == f"baton {version('baton-serve')}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--wings", "2"), "--wings"),
        (("serve", "--prefill", "two"), "--prefill"),
        (("serve", "--launcher", "slurm"), "slurm"),
        (("worker", "--role", "both"), "both"),
        (("serve", "--prefill", "65"), "--prefill: '65': give a whole number from 0 to 64"),
        (("serve", "--decode", "0"), "--decode: '0': give a whole number from 1 to 64"),
        (("serve", "--start-timeout", "nan"), "--start-timeout: 'nan': give seconds above 0"),
        (("serve", "--start-timeout", "inf"), "--start-timeout: 'inf': give seconds above 0"),
        (("serve", "--port", "99999"), "--port: router.port is 99999: give a value from 0 to"),
        (("serve", "--port", "many"), "--port: router.port is 'many': give a whole number"),
        (("serve", "--blocks", "-1"), "--blocks: pool.blocks is -1: give a value from 0"),
        (("serve", "--device", "gpu"), "--device: worker.device is 'gpu': give auto, cpu"),
        (("serve", "--dtype", "f8"), "--dtype: worker.dtype is 'f8': give one of auto, float32"),
        (("doctor", "--set", "router.prot=1"), "--set: there is no setting router.prot; did you"),
        (("doctor", "--set", "router.port=x"), "--set: router.port is 'x': give a whole number"),
        (("serve", "--registry", "redis://[::1:1"), "--registry: registry.location is no URL of"),
        (("faults", "--seeds", "0"), "--seeds: '0': give a whole number from 1"),
        (("faults", "--from", "-5"), "--from: '-5': give a whole number from 0"),
        (("faults", "--jobs", "2000"), "--jobs: '2000': give a whole number from 1 to 1024"),
        (("faults", "--json", "/tmp"), "--json: /tmp is a folder: give a file"),
        (("faults", "--json", "/no/x.json"), "--json: there is no folder /no: give a file"),
    ],
)
def test_a_malformed_command_line_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "/no/such/model", "--port", "0"), "no folder /no/such/model"),
        (("serve", "--prefill", "0", "--placement", "disaggregated"), "needs --prefill 1"),
        (("serve", "--port", "80", "--grpc-port", "80"), "router.grpc_port and router.port"),
        (("serve", "--set", "step.chunk_tokens=100"), "give a multiple of pool.block_size"),
        (("serve", "--config", "/no/such/file"), "/no/such/file"),
        (("chat", "--url", "nowhere"), "nowhere"),
        (
            ("worker", "--role", "decode", "--worker-id", "d", "--model", "m", "--registry", "r"),
            "BATON_TOKEN",
        ),
        (("router", "--model", "m", "--registry", "r"), "BATON_TOKEN"),
        (("drain", "w", "--registry", "r"), "BATON_TOKEN"),
        (("role", "w", "decode", "--registry", "r"), "BATON_TOKEN"),
    ],
)
def test_a_mistake_is_one_line_without_a_traceback(arguments: tuple[str, ...], words: str) -> None:
    done = baton(*arguments)
    assert done.returncode == CONFIG_EXIT
    assert words in done.stderr
    assert done.stderr.startswith("baton: error: ") and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_child_leaves_its_message_where_its_supervisor_looks(tmp_path: Path) -> None:
    file = tmp_path / "decode-0.error"
    baton("serve", "--config", "/no/such/file", BATON_ERROR_FILE=str(file))
    assert file.read_text().startswith("cannot read /no/such/file")


def test_a_server_that_is_not_there_is_no_configuration_error() -> None:
    done = baton("chat", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1 and "nothing answers" in done.stderr


def test_kv_dtype_becomes_a_setting() -> None:
    flags = flags_of(main.parser().parse_args(["serve", "--kv-dtype", "fp8_e4m3"]))
    assert load(None, {}, flags).pool.kv_dtype == "fp8_e4m3"
    with pytest.raises(ConfigError, match=r"pool\.kv_dtype is 'int4': give one of auto, int8"):
        load(None, {}, {"pool.kv_dtype": "int4"})


def test_options_become_settings_and_set_wins() -> None:
    options = main.parser().parse_args(
        ["serve", "--port", "1", "--placement", "local", "--set", "router.port=2",
         "--set", " pool.block_size = 32 "]
    )  # fmt: skip
    assert flags_of(options) == {
        "router.port": "2",
        "router.placement": "local",
        "pool.block_size": "32",
    }


@pytest.mark.parametrize("text", ["a", "a=1", "a.b.c=1", "a.b"])
def test_a_malformed_setting_is_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["serve", "--set", text])
    assert ended.value.code == 2 and "write it as section.key=value" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["registry.password=hunter2", " registry.location = redis://:hunter2@db"]
)
def test_a_password_given_by_set_is_refused_unshown(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["cluster", "status", "--set", text])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "set BATON_REGISTRY__PASSWORD" in error
    assert "hunter2" not in error


def test_the_demo_is_disaggregated_by_default() -> None:
    parse = main.parser().parse_args
    assert flags_of(parse(["demo"]))["router.placement"] == "disaggregated"
    assert flags_of(parse(["demo", "--placement", "local"]))["router.placement"] == "local"
    assert "router.placement" not in flags_of(parse(["serve"]))


def test_ray_address_comes_from_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert main.parser().parse_args(["serve"]).ray_address == "10.0.0.1:6379"
    monkeypatch.delenv("RAY_ADDRESS")
    assert main.parser().parse_args(["serve"]).ray_address == ""
