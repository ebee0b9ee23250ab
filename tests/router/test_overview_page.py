"""The warning of the console's first panel, judged by the page's own module."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "router" / "console" / "page"
NODE = shutil.which("node")
PROGRAM = """
import { mainFault } from "./overview.js";
console.log(JSON.stringify(JSON.parse(process.argv[2]).map((each) => mainFault(each) ?? null)));
"""
FAULTS: list[tuple[dict[str, int], list[str | int] | None]] = [
    ({}, None),
    ({"short": 9, "cached": 2}, None),
    ({"moved": 1, "failed": 90}, None),
    ({"short": 90, "failed": 1, "left": 2}, ["left", 2]),
]


@pytest.mark.skipif(NODE is None, reason="node is absent: it runs the page's module")
def test_a_page_warns_of_prompts_that_needed_a_handoff(tmp_path: Path) -> None:
    for name in ("overview.js", "chart.js", "dom.js", "format.js"):
        shutil.copy(PAGE / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "program.js").write_text(PROGRAM)
    given = json.dumps([prefills for prefills, _ in FAULTS])
    command = [str(NODE), str(tmp_path / "program.js"), given]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [fault for _, fault in FAULTS]
