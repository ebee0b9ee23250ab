"""`baton bench` against a real fleet: its figures are those that the router counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.deploy.cli import main
from chaos.cluster import Cluster


@pytest.mark.parametrize("load", [["--concurrency", "3"], ["--rate", "20"]])
def test_the_bench_counts_what_the_router_counts(
    pair: Cluster, tmp_path: Path, load: list[str]
) -> None:
    trace, file = tmp_path / "trace.jsonl", tmp_path / "report.json"
    row = {"timestamp": 0, "input_length": 1200, "output_length": 48}
    rows = [row | {"hash_ids": [1, 2, 9 + n]} for n in range(12)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    words = ["bench", "--url", pair.url, "--trace", str(trace), "--scale", "0.125", *load]
    names = ["baton_prompt_tokens_sum", "baton_output_tokens_sum", "baton_output_tokens_count"]
    before = [pair.metric("router", name) for name in names]
    assert main.main([*words, "--tokens-per-word", "1.5", "--json", str(file)]) == 0
    after = [pair.metric("router", name) for name in names]
    report = json.loads(file.read_text())
    counted = [report["prompt_tokens"], report["output_tokens"], report["finished"]]
    assert counted == [after[at] - before[at] for at in range(3)]
    assert counted[1:] == [12 * 6, 12] and report["errors"] == {}
    assert 0 < report["ttft_s"]["p50"] < report["e2e_s"]["p50"]
