"""The verdicts of all runs as one table, on the terminal and as JSON.

A row sums up the runs of a scenario; `seconds` are their median and worst time to recover.
Pure but for printing and one file.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures.report import command, machine
from chaos.stage import Scenario
from chaos.verdict import Verdict

COLUMNS = ("requests", "failed", "wrong", "hung", "refused", "cut", "retried", "left")


@dataclass(frozen=True, slots=True)
class Row:
    """`counts` by column; `seconds`: of each run that counts, None where it never recovered."""

    name: str
    fault: str
    runs: int
    counts: dict[str, int]
    seconds: list[float | None]
    state: str  # kept, BROKEN, void, skipped

    def recovered(self) -> str:
        """Median and worst, in seconds."""
        if not self.seconds:
            return "-"
        known = sorted(s for s in self.seconds if s is not None)
        worst = f"{known[-1]:.1f}" if len(known) == len(self.seconds) else "never"
        return f"{statistics.median(known):.1f} / {worst}" if known else "never"


def row(scenario: Scenario, verdicts: Sequence[Verdict], skipped: bool) -> Row:
    """Sum up the verdicts of this scenario; void runs count for nothing but their state."""
    mine = [verdict for verdict in verdicts if verdict.scenario == scenario.name]
    good = [verdict for verdict in mine if not verdict.void]
    counts = {
        column: sum(_count(verdict, column) for verdict in good)
        for column in COLUMNS
    }  # fmt: skip
    if any(verdict.broken for verdict in mine):
        state = "BROKEN"
    elif skipped:
        state = "skipped"
    else:
        state = "kept" if good and len(good) == len(mine) else "void"
    seconds = [verdict.recovery.seconds for verdict in good]
    return Row(scenario.name, scenario.fault, len(good), counts, seconds, state)


def _count(verdict: Verdict, column: str) -> int:
    special = {
        "requests": verdict.requests,
        "retried": verdict.retried,
        "left": sum(verdict.left.values()),  # blocks
    }
    return special[column] if column in special else verdict.counts[column]


def report(
    scenarios: Sequence[Scenario],
    verdicts: Sequence[Verdict],
    skipped: Mapping[str, str],
    per_s: Mapping[Any, float],
) -> int:
    """Print the table; 1 if a promise was broken or a run was void."""
    rows = _rows(scenarios, verdicts, skipped)
    print(f"$ {command()}")
    print("  ".join(f"{name} {value}" for name, value in machine().items()))
    print("load: " + ", ".join(f"{name} {rate:.1f}/s" for name, rate in per_s.items()))
    kinds = sum((Counter(verdict.kinds) for verdict in verdicts), Counter[str]())
    print("kinds: " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    width = max(len(each.name) for each in rows)
    print(f"{'':<{width}} runs " + " ".join(f"{name:>8}" for name in COLUMNS) + "  recovered s")
    for each in rows:
        counts = " ".join(f"{each.counts[name]:>8}" for name in COLUMNS)
        print(f"{each.name:<{width}} {each.runs:>4} {counts}  {each.recovered():<12} {each.state}")
    return int(any(each.state in ("BROKEN", "void") for each in rows))


def write(
    file: Path,
    scenarios: Sequence[Scenario],
    verdicts: Sequence[Verdict],
    skipped: Mapping[str, str],
    per_s: Mapping[Any, float],
) -> None:
    """The same, and every verdict. A reader of the file finds it whole."""
    content = {
        "command": command(),
        "machine": machine(),
        "per_s": dict(per_s),
        "skipped": dict(skipped),
        "rows": [asdict(each) for each in _rows(scenarios, verdicts, skipped)],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(file)


def _rows(
    scenarios: Sequence[Scenario], verdicts: Sequence[Verdict], skipped: Mapping[str, str]
) -> list[Row]:
    return [row(scenario, verdicts, scenario.name in skipped) for scenario in scenarios]
