"""docs/reliability: the tests that it names exist, each scenario of `make chaos` has its row."""

from __future__ import annotations

import re
from pathlib import Path

from chaos.host_scenarios import HOSTS, RAY
from chaos.scenarios import ALL

ROOT = Path(__file__).resolve().parents[2]
PROMISES = (ROOT / "docs" / "reliability" / "promises.md").read_text()
LAB = (ROOT / "docs" / "reliability" / "lab.md").read_text()
FILE = re.compile(r"((?:tests|benchmarks)(?:/\w+)*/)?(\w+\.py)\b")


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table whose heading begins so."""
    lines = text.partition(f"\n{heading}")[2].split("\n")[2:]
    table = lines[: next(n for n, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def test_what_is_named_as_a_faults_test_exists() -> None:
    found = rows(PROMISES, "| fault | what happens | bound | where tested |")
    assert len(found) > 35
    for fault, _, _, where in found:
        folder, files = "", FILE.findall(where)
        assert files, fault
        for stated, name in files:
            folder = stated or folder
            assert (ROOT / folder / name).is_file(), f"{fault}: {folder}{name}"


def test_each_scenario_has_a_row_with_three_runs_at_least() -> None:
    found = rows(LAB, "| fault | what happens | seconds to recover |")
    unmeasured = set(re.findall(r"`ONLY=[\w-]+`", LAB.partition("Not measured yet: ")[2]))
    many = (*HOSTS, *RAY)
    wanted = {f"`ONLY={scenario.name}`" for scenario in ALL if scenario not in many} - unmeasured
    assert {row[-1] for row in found} == wanted and len(unmeasured) <= 2
    assert len(found) == len(wanted)
    redundant = {f"`ONLY={scenario.name}`" for scenario in ALL if scenario.redundant}
    for row in found:
        assert row[3].startswith("0 failed, ") or row[-1] not in redundant
        assert int(row[4]) >= 3 and re.fullmatch(r"[\d.]+ / [\d.]+|.*never.*", row[2])
        assert re.search(r"0 wrong, 0 hung of \d+", row[3])


def test_each_scenario_of_many_hosts_has_a_row() -> None:
    found = rows(LAB, "| fault on three hosts | what happens |")
    unmeasured = set(re.findall(r"`ONLY=[\w-]+`", LAB.partition("Not run yet on hosts: ")[2]))
    wanted = {f"`ONLY={each.name}`" for each in (*HOSTS, *RAY)} - unmeasured
    assert {row[-1] for row in found} == wanted and len(found) == len(wanted)
    for row in found:
        assert row[3].startswith("0 failed, 0 wrong, 0 hung of "), row
        assert int(row[4]) >= 1 and re.fullmatch(r"[\d.]+ / [\d.]+|.*never.*", row[2])
