"""The short form of `make chaos`: real processes, a few faults once, every token compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.asks import Kind
from chaos.report import report, row, write
from chaos.run import main
from chaos.scenarios import ALL, SHORT
from chaos.stage import Scenario
from chaos.verdict import Recovery, Verdict

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(400)
def test_nothing_is_lost_wrong_or_left(tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    done = subprocess.run(
        [sys.executable, "-m", "chaos.run", "--short", f"--json={file}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(file.read_text())
    assert set().union(*(each["kinds"] for each in written["verdicts"])) == {k.value for k in Kind}
    rows = {each["name"]: each for each in written["rows"]}
    assert set(rows) == set(SHORT)
    for found in rows.values():
        assert found["state"] == "kept" and found["counts"]["requests"] >= 10
        for lost in ("failed", "wrong", "hung", "refused", "left"):
            assert found["counts"][lost] == 0


async def nothing(_: object) -> None:
    pass


SCENARIO = Scenario("kill-decode", "kill -9", nothing)


def verdict(run: int, seconds: float | None = 1.0, **more: object) -> Verdict:
    counts = {"right": 8, "failed": 1, "wrong": 0, "hung": 0, "refused": 0, "cut": 2, "left": 3}
    made = Verdict("kill-decode", run, counts, 1, Recovery(seconds, 1.0), {"decode-0": 4})
    made.kinds = {"greedy": 10, "stop": 4}
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_a_row_sums_up_the_runs_that_count() -> None:
    verdicts = [verdict(0), verdict(1, 3.0), verdict(2, 2.0), verdict(3, 9.0, void="too little")]
    found = row(SCENARIO, verdicts, skipped=False)
    assert found.runs == 3 and found.counts["requests"] == 42 and found.counts["failed"] == 3
    assert found.counts["cut"] == 6 and found.counts["retried"] == 3
    assert found.counts["left"] == 12  # blocks, not the clients that went away
    assert found.recovered() == "2.0 / 3.0"
    assert found.state == "void"
    assert row(SCENARIO, verdicts[:3], skipped=False).state == "kept"
    assert row(SCENARIO, [verdict(0, broken=["x"])], skipped=False).state == "BROKEN"
    assert row(SCENARIO, [], skipped=True).state == "skipped"
    assert row(SCENARIO, [], skipped=False).state == "void"  # nothing was shown


def test_a_run_that_never_recovers_is_reported() -> None:
    assert row(SCENARIO, [verdict(0), verdict(1, None)], skipped=False).recovered() == "1.0 / never"
    assert row(SCENARIO, [verdict(0, None)], skipped=False).recovered() == "never"


def test_table_and_file_list_kept_and_skipped_scenarios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Scenario("tcp-none", "none", nothing, "tcp")
    file, per_s = tmp_path / "new" / "chaos.json", {"memory": 3.0}
    skipped = {"tcp-none": "needs root"}
    assert report([SCENARIO, other], [verdict(0)], skipped, per_s) == 0
    write(file, [SCENARIO, other], [verdict(0)], skipped, per_s)
    assert report([SCENARIO], [verdict(0, broken=["decode-0 holds"])], {}, per_s) == 1
    assert report([SCENARIO], [verdict(0, void="too little load")], {}, per_s) == 1
    shown = capsys.readouterr().out
    assert "kinds: greedy 10, stop 4" in shown
    assert "kill-decode" in shown and "BROKEN" in shown and "skipped" in shown
    written = json.loads(file.read_text())
    assert written["skipped"] == skipped and written["rows"][0]["state"] == "kept"
    assert written["verdicts"][0]["counts"]["cut"] == 2


def test_scenario_names_are_unique_and_unknown_ones_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [scenario.name for scenario in ALL]
    assert len(set(names)) == len(names) and set(SHORT) <= set(names)
    with pytest.raises(SystemExit):
        main(["--only", "kill-everything"])
    assert "kill-everything" in capsys.readouterr().err


def test_what_cannot_be_done_here_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from chaos.run import skipped

    monkeypatch.setattr("chaos.network.unavailable", lambda: "needs root")
    monkeypatch.setattr("chaos.hosts.unavailable", lambda: "no redis-server")
    monkeypatch.setattr("chaos.hosts.ray_unavailable", lambda: "no ray")
    monkeypatch.setattr("chaos.small_disk.unavailable", lambda: "no mount")
    monkeypatch.setattr("chaos.held_thread.unavailable", lambda: "no ptrace")
    found = skipped(ALL)
    assert found["full-disk"] == "no mount" and found["tcp-cut-decode-in"] == "needs root"
    assert found["hang-decode"] == "no ptrace"
    assert (found["redis-kill"], found["ray-roll"]) == ("no redis-server", "no ray")
    assert set(found) == {s.name for s in ALL if s.transport != "memory" or s.needs}
    monkeypatch.setattr("chaos.held_thread.unavailable", str)
    assert not any(s.needs == "trace" and s.name in skipped(ALL) for s in ALL)
