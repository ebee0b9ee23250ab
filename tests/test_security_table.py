"""docs/security.md names tests that exist, for every advisory that is not told as exposed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = (ROOT / "docs" / "security.md").read_text()
NAMED = re.compile(r"`((?:\w+/)?test_\w+\.py)::(test_\w+)`")


def rows() -> list[list[str]]:
    lines = [line for line in TABLE.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] not in ("advisory", "---")]


def test_every_named_test_exists() -> None:
    missing = []
    for file, name in sorted(set(NAMED.findall(TABLE))):
        path = ROOT / "tests" / file
        tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
        functions = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if name not in functions:
            missing.append(f"{file}::{name}")
    assert missing == []


def test_every_advisory_is_held_or_told_as_not() -> None:
    assert len(rows()) > 35
    for row in rows():
        assert len(row) == 4, row
        advisory, _, here, held = row
        told = "exposed" in here or "not " in here
        assert NAMED.findall(held) or (held == "-" and told), advisory


def test_nothing_is_named_twice_as_another_advisory() -> None:
    names = [name for row in rows() for name in re.findall(r"(?:CVE|PYSEC|GHSA)-[\w-]+", row[0])]
    assert len(names) == len(set(names)) > 40
