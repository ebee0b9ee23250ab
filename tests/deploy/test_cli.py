"""The command line: fast help, one clear line per mistake, settings from options."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from baton.deploy import cli
from baton.deploy.restarts import CONFIG_EXIT
from baton.runtime.errors import ConfigError
from baton.runtime.settings import load

COMMANDS = (
    *("serve", "demo", "worker", "router", "chat", "ps", "drain", "role", "faults", "doctor"),
)


def baton(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "baton.deploy.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={k: v for k, v in os.environ.items() if k != "BATON_TOKEN"} | environment,
    )


def test_help_names_every_command() -> None:
    done = baton("--help")
    assert done.returncode == 0
    assert [name for name in COMMANDS if f"\n    {name} " not in done.stdout] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0


def test_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"baton {version('baton-serve')}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "COMMAND"),
        (("fly",), "invalid choice: 'fly'"),
        (("serve", "--wings", "2"), "--wings"),
        (("serve", "--prefill", "two"), "--prefill"),
        (("serve", "--launcher", "slurm"), "slurm"),
        (("worker", "--role", "both"), "both"),
    ],
)
def test_a_malformed_command_line_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "/no/such/model", "--port", "0"), "no folder /no/such/model"),
        (("serve", "--decode", "0"), "--decode is 0"),
        (("serve", "--port", "99999"), "router.port is 99999"),
        (("serve", "--port", "many"), "router.port"),
        (("serve", "--blocks", "-1"), "pool.blocks"),
        (("serve", "--set", "router.prot=1"), "router.port"),
        (("serve", "--set", "nonsense"), "section.key=value"),
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


def test_a_child_leaves_its_message_where_its_keeper_looks(tmp_path: Path) -> None:
    file = tmp_path / "decode-0.error"
    baton("serve", "--decode", "0", BATON_ERROR_FILE=str(file))
    assert file.read_text().startswith("--decode is 0")


def test_a_server_that_is_not_there_is_no_configuration_error() -> None:
    done = baton("chat", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1 and "nothing answers" in done.stderr


def test_kv_dtype_becomes_a_setting() -> None:
    flags = cli.flags_of(cli.parser().parse_args(["serve", "--kv-dtype", "fp8_e4m3"]))
    assert load(None, {}, flags).pool.kv_dtype == "fp8_e4m3"
    with pytest.raises(ConfigError, match=r"pool\.kv_dtype is 'int4': give one of auto, int8"):
        load(None, {}, {"pool.kv_dtype": "int4"})


def test_options_become_settings_and_set_wins() -> None:
    options = cli.parser().parse_args(
        ["serve", "--port", "1", "--placement", "local", "--set", "router.port=2",
         "--set", " pool.block_size = 32 "]
    )  # fmt: skip
    assert cli.flags_of(options) == {
        "router.port": "2",
        "router.placement": "local",
        "pool.block_size": "32",
    }


@pytest.mark.parametrize("text", ["a", "a=1", "a.b.c=1", "a.b"])
def test_a_malformed_setting_is_refused(text: str) -> None:
    options = cli.parser().parse_args(["serve", "--set", text])
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        cli.flags_of(options)


def test_the_demo_is_disaggregated_unless_told_otherwise() -> None:
    parse = cli.parser().parse_args
    assert cli.flags_of(parse(["demo"]))["router.placement"] == "disaggregated"
    assert cli.flags_of(parse(["demo", "--placement", "local"]))["router.placement"] == "local"
    assert "router.placement" not in cli.flags_of(parse(["serve"]))


def test_ray_address_comes_from_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cli.parser().parse_args(["serve"]).ray_address == "10.0.0.1:6379"
    monkeypatch.delenv("RAY_ADDRESS")
    assert cli.parser().parse_args(["serve"]).ray_address == ""
