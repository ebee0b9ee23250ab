"""`baton faults`: what it counts, what it prints of a failing seed, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from baton.deploy.cli import main
from baton.runtime.errors import ConfigError
from baton.simulation import fault_report, lab
from baton.simulation.fault_report import Report, faults, run
from baton.simulation.fleet.draw_scenario import STORM_SEED, draw
from baton.simulation.mutations import regressions
from baton.simulation.mutations.regressions import PAST_BUGS

CAUGHT_BY = 1  # a seed that catches the mutation below
MUTATION = "lose-tickets"


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_the_report_has_the_keys_that_it_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "faults.json"
    assert faults(3, 4, json_file=file) == 0
    report = json.loads(file.read_text())
    promised = {"seeds", "void", "violations", "requests", "faults", "seeds_per_s"}
    assert promised <= set(report)
    assert report["seeds"] == 4 and report["past"] == len(regressions.seeds()) > 0
    assert report["violations"] == [] and report["failing_seeds"] == []
    assert report["requests"] >= 4 * 4
    assert sum(report["ends"].values()) == report["requests"]
    ran = [*regressions.seeds(), *range(3, 7)]
    kinds = [e.does.kind for seed in ran for e in draw(seed).faults]
    assert sum(report["faults"].values()) == len(kinds) and set(report["faults"]) == set(kinds)
    assert report["seeds_per_s"] > 0 and report["void"] <= len(ran)
    assert "0 failing seeds" in capsys.readouterr().out


@pytest.mark.nightly
def test_progress_and_failing_seeds_are_reported_on_the_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fault_report, "TELL_S", 0.0)
    report = run(CAUGHT_BY, 2, mutation=MUTATION, past=False)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["from 1 to 1", "from 1 to 2"]
    assert lines[-1].count(f"{len(report.failing_seeds)} failing seeds ({CAUGHT_BY}") == 1


def test_a_failing_seed_is_shown_with_the_command_to_repeat_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = run(CAUGHT_BY, 1, mutation=MUTATION, past=False)
    assert report.failing_seeds == [CAUGHT_BY]
    (violation,) = report.violations
    *_, again = violation.splitlines()
    assert f"--from {CAUGHT_BY} --seeds 1 --keep " in again and f"--mutation {MUTATION}" in again
    arguments = again.split("baton ")[1].split()
    kept = arguments[arguments.index("--keep") + 1].split(",")
    assert len(kept) < len(draw(CAUGHT_BY).events)
    assert main.main(arguments) == 0  # a mutation that is noticed is what is wanted
    assert f"caught by seed {CAUGHT_BY}" in capsys.readouterr().out


@pytest.mark.nightly
def test_kept_events_are_of_the_named_seed_and_no_regression() -> None:
    last = len(draw(STORM_SEED).events) - 1
    assert any(len(draw(seed).events) <= last for seed in regressions.seeds())
    report = run(STORM_SEED, 1, keep=(0, last))
    assert (report.seeds, report.past, report.requests) == (1, 0, 1 + 1)  # and the probe
    with pytest.raises(ConfigError, match=f"--keep: seed {STORM_SEED} has the events 0 to {last}"):
        run(STORM_SEED, 1, keep=(0, last + 1))


def test_a_seed_whose_run_breaks_down_is_shown_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaking(world: object) -> list[str]:
        raise KeyError("d7")

    monkeypatch.setattr(lab.rest, "restless", breaking)
    monkeypatch.setattr(fault_report, "MAX_SHORTENED", 0)
    (violation,) = run(5, 1, past=False).violations
    first, *_, again = violation.splitlines()
    assert first.startswith("seed 5: the lab raised KeyError('d7') at breaking:")
    assert again == "  again: baton faults --from 5 --seeds 1"


@pytest.mark.nightly
def test_a_failing_seed_that_does_not_repeat_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    breaches, unharmed = iter([["2 blocks are in use"]]), lab.run

    def run_once_badly(*args: Any, **kwargs: Any) -> lab.Outcome:
        outcome = unharmed(*args, **kwargs)
        outcome.breaches = next(breaches, [])
        return outcome

    monkeypatch.setattr(lab, "run", run_once_badly)
    (violation,) = run(5, 1, past=False).violations
    first, again = violation.splitlines()
    assert first == "seed 5 does not repeat: 2 blocks are in use"
    assert again == "  again: baton faults --from 5 --seeds 1"


@pytest.mark.nightly
def test_each_failing_seed_has_a_line_but_not_all_are_shortened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fault_report, "MAX_SHORTENED", 1)
    report = run(0, 4, mutation=MUTATION, past=False)
    assert len(report.failing_seeds) > 2
    assert len(report.violations) == len(report.failing_seeds)
    again = [text.split("again: ")[1] for text in report.violations]
    commands = [f"baton faults --from {seed} --seeds 1" for seed in report.failing_seeds]
    assert again[0].startswith(f"{commands[0]} --keep ")
    assert again[1:] == [f"{command} --mutation {MUTATION}" for command in commands[1:]]
    kept = run(report.failing_seeds[0], 1, mutation=MUTATION, keep=(0, 1), past=False)
    assert kept.violations[-1].endswith(f" --keep 0,1 --mutation {MUTATION}")


def test_a_broken_promise_and_an_unnoticed_mutation_end_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(regressions, "PAST_BUGS", {})
    assert faults(CAUGHT_BY, 1, mutation=MUTATION) == 0
    assert faults(CAUGHT_BY, 1, mutation="no-quarantine", keep=()) == 1
    assert "NOT CAUGHT" in capsys.readouterr().out
    broken = fault_report.mutations.named(MUTATION)
    monkeypatch.setattr(fault_report, "nullcontext", broken)
    assert faults(CAUGHT_BY, 1) == 1


@pytest.mark.nightly
def test_void_seeds_are_named_and_a_run_of_nothing_else_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(regressions, "PAST_BUGS", {})
    most = fault_report.MAX_VOID
    real = lab.Run.note_load

    def note_load(self: lab.Run) -> None:
        real(self)
        self.outcome.void = self.outcome.seed in range(3, 20)

    monkeypatch.setattr(lab.Run, "note_load", note_load)
    file = tmp_path / "faults.json"
    assert faults(2, most + 2, json_file=file) == 0  # one of them is not
    report = json.loads(file.read_text())
    assert report["void"] == most + 1 and report["void_seeds"] == [*range(3, 3 + most)]
    assert f"({most + 1} void: 3, 4, " in (out := capsys.readouterr().out) and ", ...)" in out
    assert faults(3, 2) == 1
    assert "every seed was void: too little load" in capsys.readouterr().out
    assert faults(3, 1, keep=()) == 0  # a part of a seed


def test_void_seeds_of_several_processes_add_up() -> None:
    one, two = (Report(seeds=8, void=8, void_seeds=[*range(first, first + 8)]) for first in (0, 8))
    one.merge(two.as_json())
    assert one.proves_nothing and one.void_seeds == [*range(fault_report.MAX_VOID)]
    one.add(lab.Outcome(99, void=True), past=True)
    assert one.proves_nothing and one.void_past == 1
    one.add(lab.Outcome(16), past=False)
    assert not one.proves_nothing


@pytest.mark.nightly
def test_past_bugs_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    bug = next(iter(PAST_BUGS.values()))
    bugs = {"one": replace(bug, seed=901), "two": replace(bug, seed=902)}
    monkeypatch.setattr(regressions, "PAST_BUGS", bugs)
    ran: list[int] = []
    real = fault_report.draw
    monkeypatch.setattr(fault_report, "draw", lambda seed: ran.append(seed) or real(seed))
    report = run(5, 2)
    assert (report.seeds, report.past) == (2, 2)
    assert ran == [901, 902, 5, 6]
    assert "2 seeds and 2 of past bugs (" in fault_report.summary_line(report)
    ran.clear()
    assert run(5, 2, past=False).seeds == 2
    assert ran == [5, 6]


@pytest.mark.nightly
def test_several_processes_add_up_to_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert faults(0, 5, json_file=one) == 0
    assert faults(0, 5, jobs=2, json_file=two) == 0
    alone, together = (json.loads(file.read_text()) for file in (one, two))
    for key in alone.keys() - {"seeds_per_s", "virtual_s"}:
        assert alone[key] == together[key], key


def test_a_process_that_ends_ends_the_others_and_names_its_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(first: int, *_: object) -> subprocess.Popen[bytes]:
        work = "import time; time.sleep(60)" if first else "raise SystemExit(1)"
        started.append(subprocess.Popen([sys.executable, "-c", work]))
        return started[-1]

    monkeypatch.setattr(fault_report, "start_job", start)
    monkeypatch.setattr(regressions, "PAST_BUGS", {})
    with pytest.raises(ConfigError, match="the process of seeds 0 to 2 ended with 1"):
        faults(0, 6, jobs=2)
    assert [process.returncode for process in started] == [1, -signal.SIGKILL]


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """However that ends: the system closes its end of the pipe."""
    process = fault_report.start_job(0, 1_000_000, 0, None, tmp_path)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 1


def test_what_cannot_be_meant_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="--seeds and --jobs"):
        faults(0, 0)
    with pytest.raises(ConfigError, match=f"--json .*: there is no folder {tmp_path / 'none'}"):
        faults(0, 1, json_file=tmp_path / "none" / "faults.json")
    for name in ("nothing", ""):
        with pytest.raises(ConfigError, match=f"--mutation {name}: give one of skip-checksums"):
            faults(0, 1, mutation=name)
    assert main.main(["faults", "--keep", "1,x"]) == 78  # EX_CONFIG
    assert "--keep 1,x: give event numbers" in capsys.readouterr().err
