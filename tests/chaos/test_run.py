"""A run of many scenarios: one that fails stops no other, and what was seen is kept."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from chaos import run
from chaos.cluster import ClusterError
from chaos.run import Chaos, main
from chaos.scenarios import ALL
from chaos.stage import Scenario
from chaos.verdict import Recovery, Verdict

Fails = dict[str, BaseException]


def kept(scenario: Scenario, number: int) -> Verdict:
    counts = dict.fromkeys(("right", "wrong", "failed", "refused", "cut", "hung", "left"), 0)
    return Verdict(scenario.name, number, counts | {"right": 9}, 0, Recovery(0.0, 0.0))


class Fleets:
    """In place of real ones. `fails`: by scenario, what its run raises, and by transport, what
    its fleet does as it starts."""

    def __init__(self, fails: Fails) -> None:
        self.fails = fails
        self.started: list[str] = []
        self.ended = 0

    def start(self, held: contextlib.ExitStack, scenarios: Sequence[Scenario]) -> None:
        transport = scenarios[0].transport
        self.started.append(transport)
        if transport in self.fails:
            raise self.fails[transport]
        held.callback(self._end)

    def _end(self) -> None:
        self.ended += 1

    async def once(self, _: object, scenario: Scenario, number: int) -> Verdict:
        if scenario.name in self.fails:
            raise self.fails[scenario.name]
        return kept(scenario, number)


@pytest.fixture
def fleets_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fails], Fleets]:
    monkeypatch.setattr(run, "right_answers", lambda *_: {})
    monkeypatch.setattr(run, "skipped", lambda _: {})
    monkeypatch.setattr(run, "end_cleanly", lambda: None)

    def make(fails: Fails) -> Fleets:
        made = Fleets(fails)
        monkeypatch.setattr(Chaos, "_fleet", lambda _, *given: made.start(*given))
        monkeypatch.setattr(Chaos, "_once", lambda _, *given: made.once(*given))
        return made

    return make


def states(file: Path) -> dict[str, tuple[int, str]]:
    rows = json.loads(file.read_text())["rows"]
    return {each["name"]: (each["runs"], each["state"]) for each in rows}


def test_a_failed_scenario_is_followed_by_a_new_fleet(
    fleets_of: Callable[[Fails], Fleets], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleets = fleets_of({"kill-decode": KeyError("decode-0")})
    file = tmp_path / "chaos.json"
    names = "none,kill-decode,kill-prefill"
    assert main(["--only", names, "--runs", "2", "--json", str(file)]) == 1
    assert states(file) == {
        "none": (2, "kept"), "kill-decode": (0, "BROKEN"), "kill-prefill": (2, "kept")
    }  # fmt: skip
    assert fleets.started == ["memory"] * 3 and fleets.ended == 3
    shown = capsys.readouterr()
    assert "KeyError('decode-0')" in shown.out and "Traceback" in shown.err


def test_a_fleet_that_does_not_start_stops_no_other(
    fleets_of: Callable[[Fails], Fleets], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleets_of({"memory": ClusterError("decode-0 has ended")})
    file = tmp_path / "chaos.json"
    assert main(["--only", "none,tcp-none", "--runs", "1", "--json", str(file)]) == 1
    assert states(file) == {"none": (0, "void"), "tcp-none": (1, "kept")}
    assert "memory: no fleet: ClusterError" in capsys.readouterr().out


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(143)])
def test_a_stopped_run_reports_what_it_has_seen(
    fleets_of: Callable[[Fails], Fleets],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    end: BaseException,
) -> None:
    fleets = fleets_of({"kill-decode": end})
    file = tmp_path / "chaos.json"
    with pytest.raises(type(end)):
        main(["--only", "none,kill-decode,kill-prefill", "--runs", "1", "--json", str(file)])
    assert states(file) == {
        "none": (1, "kept"), "kill-decode": (0, "void"), "kill-prefill": (0, "void")
    }  # fmt: skip
    assert fleets.ended == 1 and "minutes" in capsys.readouterr().out


def test_the_file_is_whole_after_every_run(
    fleets_of: Callable[[Fails], Fleets], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that even a kill -9 leaves the runs before it."""
    fleets = fleets_of({})
    file = tmp_path / "chaos.json"
    before: list[int] = []

    async def looked(_: Chaos, fleet: object, scenario: Scenario, number: int) -> Verdict:
        before.append(len(json.loads(file.read_text())["verdicts"]) if file.exists() else 0)
        return await fleets.once(fleet, scenario, number)

    monkeypatch.setattr(Chaos, "_once", looked)
    assert main(["--only", "none,leave", "--runs", "2", "--json", str(file)]) == 0
    assert before == [0, 1, 2, 3] and len(json.loads(file.read_text())["verdicts"]) == 4
    assert list(tmp_path.iterdir()) == [file]


def test_the_scenarios_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [scenario.name for scenario in ALL]
    assert all(scenario.fault in line for line, scenario in zip(lines, ALL, strict=True))
