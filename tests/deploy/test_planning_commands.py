"""`baton calibrate` and `baton simulate`: their files, tables and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.deploy.bench.traffic_options import UNMET_EXIT, progress_bar, read_objectives
from baton.deploy.cli import control_commands, main
from baton.deploy.control import advice_process, orders
from baton.deploy.host.restarts import CONFIG_EXIT
from baton.planner.timing_file import read_fit
from baton.runtime.errors import ConfigError
from baton.simulation.capacity.layout import Layout, Objectives
from baton.simulation.capacity.live_advice import MeasuredFleet

SAMPLES = [
    {"kind": "chunk", "tokens": n, "pairs": n * (n + 1) // 2, "seconds": 0.01 + 1e-4 * n}
    for n in (10, 100, 1000, 5000)
] + [
    {"kind": "step", "sequences": n, "context_tokens": c, "seconds": 0.01 + 1e-4 * n + 1e-7 * c}
    for n, c in ((1, 100), (8, 9000), (64, 70_000), (16, 1000))
]
TRAFFIC = "requests=40,rate=5,prompt=lognormal:900:0.7,output=exponential:60"


@pytest.fixture
def timing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    (tmp_path / "samples.jsonl").write_text("\n".join(json.dumps(each) for each in SAMPLES))
    out = tmp_path / "timing.json"
    words = ["--samples", str(tmp_path / "samples.jsonl"), "--name", "test", "--kv-bytes", "1000"]
    assert main.main(["calibrate", *words, "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["kind", "samples", "median", "error", "p90", "error", "seconds"]
    assert [line.split()[:2] for line in printed[1:3]] == [["chunk", "4"], ["step", "4"]]
    assert printed[2].endswith("0.01 + 0.0001 sequences + 1e-07 context_tokens")
    assert printed[3:] == ["not measured, so it costs nothing: transfer, host"]
    return out


def test_simulate_prints_a_table_and_writes_json(
    timing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    words = ["--traffic", TRAFFIC, "--timing", str(timing), "--prefill", "1", "--decode", "2"]
    words += ["--slo", "ttft=500ms,itl=0.04s", "--gpu-hour", "2.5", "--json", str(report)]
    assert main.main(["simulate", *words]) == 0
    shown = capsys.readouterr()
    assert "40 of 40 finished" in shown.out and "TTFT" in shown.out and shown.err == ""
    assert shown.out.endswith("median errors of its fit: chunk 0.0%, step 0.0%\n")
    found = json.loads(report.read_text())
    assert (found["requests"], found["roles"]["decode"]["workers"]) == (40, 2)
    assert 0 < found["good_share"] <= 1 and found["cost_per_million"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--decode": "0"}, "1 prefill and 0 decode workers"),
        ({"--timing": "/no/timing.json"}, "/no/timing.json cannot be read"),
        ({"--slo": "ttft=500"}, "--slo 'ttft=500': give ttft and itl once"),
        ({"--slo": "ttft=1s,ttft=2s"}, "--slo 'ttft=2s'"),
        ({"--slo": "itl=-3ms"}, "--slo 'itl=-3ms': '-3': give a number above 0"),
        ({"--slo": "e2e=3s"}, "--slo 'e2e=3s'"),
        ({"--traffic": "requests=40"}, "the distributions lack rate, prompt, output"),
    ],
)
def test_wrong_input_is_one_clear_line(
    timing: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str], message: str
) -> None:
    flags = {"--traffic": TRAFFIC, "--timing": str(timing), "--prefill": "1", "--decode": "1"}
    words = [word for pair in (flags | change).items() for word in pair]
    assert main.main(["simulate", *words]) == CONFIG_EXIT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("baton: error: ") and message in line


@pytest.mark.parametrize(
    "words", [["--speed", "0"], ["--speed", "nan"], ["--limit", "0"], ["--pool-tokens", "12"]]
)
def test_flags_out_of_range_are_refused(words: list[str]) -> None:
    given = ["--traffic", TRAFFIC, "--timing", "t", "--colocated", "1", *words]
    with pytest.raises(SystemExit) as ended:
        main.main(["simulate", *given])
    assert ended.value.code == 2


def test_placement_decides_where_prompts_are_computed(
    timing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = {}
    for placement in ("disaggregated", "local"):
        report = tmp_path / f"{placement}.json"
        words = ["--traffic", TRAFFIC, "--timing", str(timing), "--prefill", "1", "--decode", "1"]
        words += ["--placement", placement, "--json", str(report)]
        assert main.main(["simulate", *words]) == 0
        busy[placement] = json.loads(report.read_text())["roles"]["prefill"]["busy"]
    assert busy["disaggregated"] > 0 == busy["local"]
    with pytest.raises(SystemExit):
        main.main(["simulate", *words, "--placement", "somewhere"])


@pytest.mark.parametrize("command", [["simulate", "--colocated", "1"], ["tune", "--gpus", "2"]])
def test_a_missing_timing_model_names_two_ways(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*command, "--traffic", TRAFFIC, "--slo", "ttft=1s"]) == CONFIG_EXIT
    error = capsys.readouterr().err
    assert "--timing is missing, and no fleet runs here" in error
    assert "`baton advise --save FOLDER`" in error


COMMANDS = [["simulate", "--colocated", "1"], ["tune", "--gpus", "2"]]


@pytest.fixture
def fleets(timing: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The clusters that run here, one at first; its workers' pools have 4096 tokens."""
    found = [SimpleNamespace(name="main")]
    fleet = MeasuredFleet(Layout(colocated=1, pool_tokens=4096), read_fit(timing), [], Objectives())
    monkeypatch.setattr(orders, "live_clusters", lambda: found)
    monkeypatch.setattr(control_commands, "routers_of", lambda urls, name: [name])
    monkeypatch.setattr(
        advice_process, "read_fleet", lambda config, at, routers: {"main": fleet}[routers[0]]
    )
    return found


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("given", "pool"), [([], 4096), (["--pool-tokens", "8192"], 8192)])
def test_times_of_the_fleet_that_runs_here_are_taken(
    command: list[str],
    given: list[str],
    pool: int,
    fleets: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the size of its pools, unless another is given."""
    assert main.main([*command, *given, "--traffic", TRAFFIC, "--slo", "ttft=9s"]) == 0
    said = capsys.readouterr()
    assert "no --timing: times of main, which runs here" in said.err
    assert f"{pool} tokens of KV" in said.out


def test_a_pool_of_another_size_needs_its_times(
    fleets: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", "--gpus", "2", "--pool-tokens", "2=8192", "--traffic", TRAFFIC]
    assert main.main([*words, "--slo", "ttft=9s"]) == CONFIG_EXIT
    assert "--pool-tokens 2=... has no --timing 2=FILE" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_of_several_fleets_one_has_to_be_named(
    command: list[str], fleets: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fleets.append(SimpleNamespace(name="other"))
    assert main.main([*command, "--traffic", TRAFFIC, "--slo", "ttft=9s"]) == CONFIG_EXIT
    error = capsys.readouterr().err
    assert "several fleets run here (main, other)" in error
    assert "`baton advise --instance NAME --save FOLDER`" in error


def test_points_without_a_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--points", "p.csv", "--name", "x", "--kv-bytes", "1", "--out", str(tmp_path / "t")]
    assert main.main(["calibrate", *words]) == CONFIG_EXIT
    assert "name one by --model" in capsys.readouterr().err


def test_objectives_are_parsed_in_both_units() -> None:
    assert read_objectives("ttft=500ms, itl=2s") == Objectives(0.5, 2.0)
    assert read_objectives("") == Objectives()
    with pytest.raises(ConfigError):
        read_objectives("ttft")


def test_the_bar_is_drawn_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress_bar("x")(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress_bar("x")(1, 2)
    assert capsys.readouterr().err == f"\rx [{'#' * 20}{'.' * 20}] 1/2"


@pytest.mark.nightly
def test_tune_has_its_own_exit_code_when_nothing_suffices(
    timing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "advice.json"
    words = ["--traffic", TRAFFIC, "--timing", str(timing), "--gpus", "3", "--json", str(report)]
    assert main.main(["tune", *words, "--slo", "ttft=60s,itl=9s"]) == 0
    assert "is met by 90% of the requests or more" in capsys.readouterr().out
    assert {each["layout"] for each in json.loads(report.read_text())["layouts"]} == {
        "1 prefill, 2 decode", "2 prefill, 1 decode", "3 colocated",
    }  # fmt: skip
    assert main.main(["tune", *words, "--slo", "ttft=1ms"]) == UNMET_EXIT
    assert "the nearest objective that one meets is ttft=" in capsys.readouterr().out
    assert main.main(["tune", *words]) == CONFIG_EXIT
    assert "there is no objective" in capsys.readouterr().err
