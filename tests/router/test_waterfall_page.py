"""The rows of the console's waterfall, computed by the page's own module: what of a fetch came
after the first token is not drawn as hidden."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.json_values import JsonObject

PAGE = Path(__file__).parents[2] / "router" / "console" / "page"
NODE = shutil.which("node")
PROGRAM = """
import { readSpeed, rowsOf } from "./waterfall.js";
const trace = JSON.parse(process.argv[2]);
console.log(JSON.stringify([rowsOf(trace), readSpeed(trace)]));
"""
TRACE: JsonObject = {
    "path": [["receive", 1_000, 0, ""], ["chunk", 94_000, 150, "prefill-0"]],
    "after_us": 95_000,
    "after": [["fetch", 20_000, 24, "decode-0"], ["step", 85_000, 0, "decode-0"]],
    "offers": [
        [50_000, 60_000, 70_000, 9],
        [80_000, 105_000, 115_000, 8],
        [96_000, 110_000, 112_000, 7],
    ],
    "hidden_us": [20_000, 15_000, 0],
    "read_bytes": 8_000_000,
    "decode_worker": "decode-0",
}


@pytest.mark.skipif(NODE is None, reason="node is absent: it runs the page's module")
def test_a_page_draws_what_was_hidden_alone(tmp_path: Path) -> None:
    for name in ("waterfall.js", "dom.js", "format.js"):
        shutil.copy(PAGE / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "program.js").write_text(PROGRAM)
    command = [str(NODE), str(tmp_path / "program.js"), json.dumps(TRACE)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    rows, gb_per_s = json.loads(ended.stdout)
    hidden = [(row["name"], row["begin"], row["took"]) for row in rows if row["kind"] == "behind"]
    assert hidden == [
        ("9 blocks fetched", 50_000, 20_000),
        ("8 blocks fetched in part", 80_000, 15_000),
    ]
    assert [row["begin"] for row in rows if row["kind"] == "after"] == [95_000, 115_000]
    assert gb_per_s == pytest.approx(8e6 / 1e3 / 40_000)  # overlapping READs count once
