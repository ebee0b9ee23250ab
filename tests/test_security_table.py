"""docs/security.md names tests that exist, for every advisory of a part that is here."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = (ROOT / "docs" / "security.md").read_text()
NAMED = re.compile(r"`((?:\w+/)*test_\w+\.py)::(test_\w+)`")


def rows() -> list[list[str]]:
    lines = [line for line in TABLE.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] not in ("advisory", "---")]


@cache
def functions_of(path: Path) -> set[str]:
    """The names of a file's functions; of one that is absent none."""
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_named_test_exists() -> None:
    missing = []
    for file, name in sorted(set(NAMED.findall(TABLE))):
        if name not in functions_of(ROOT / "tests" / file):
            missing.append(f"{file}::{name}")
    assert missing == []


def is_held(here: str, held: str) -> bool:
    """By tests; or by there being no such part, said in these words, of which a test knows."""
    if held == "-":
        return re.fullmatch(r"No such part here: nothing imports `\w+`", here) is not None
    return bool(NAMED.findall(held))


def test_every_advisory_has_a_test_or_no_such_part_exists() -> None:
    assert len(rows()) > 35
    for row in rows():
        assert len(row) == 4, row
        assert is_held(row[2], row[3]), row[0]


@pytest.mark.parametrize(
    "here",
    [
        "hashes are not pinned",
        "not used yet",
        "exposed",
        "No such part here",
        "No such part here: x",
    ]
    + ["No such part here: nothing imports `redis`, but we do"],
)
def test_other_words_do_not_stand_for_a_test(here: str) -> None:
    assert not is_held(here, "-") and not is_held(here, "see above")


def test_what_is_said_to_be_no_part_is_imported_nowhere() -> None:
    absent = set(re.findall(r"nothing imports `(\w+)`", TABLE))
    texts = (path.read_text() for pattern in ("*/*.py", "*/*/*.py") for path in ROOT.glob(pattern))
    imported = {
        name.split(".")[0]
        for text in texts
        if any(word in text for word in {*absent, "grpc"})  # to parse all takes five seconds
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [*(a.name for a in node.names), getattr(node, "module", None) or ""]
    }
    assert absent & imported == set() and "grpc" in imported


def test_nothing_is_named_twice_as_another_advisory() -> None:
    names = [name for row in rows() for name in re.findall(r"(?:CVE|PYSEC|GHSA)-[\w-]+", row[0])]
    assert len(names) == len(set(names)) > 40
