"""`baton bench` and AIPerf measure the same server, whose delays are known, under the same load."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from baton.deploy.cli import main
from baton.models.embedded import embedded_model
from tests.support.json_values import JsonObject
from tests.support.openai_stub import Script, openai_stub

AIPERF = Path(__file__).parents[2] / "build" / "clients" / "aiperf" / "bin" / "aiperf"
TTFT_S, GAP_S, TOKENS, REQUESTS = 0.25, 0.02, 24, 60

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]


def aiperf_medians(url: str, folder: Path) -> dict[str, float]:
    """TTFT, mean time between tokens and E2E of AIPerf's run, in seconds."""
    command = f"{AIPERF} profile --model stub --url {url} --endpoint-type chat --streaming"
    command += f" --tokenizer {embedded_model()} --use-server-token-count --ui simple"
    command += f" --concurrency 4 --request-count {REQUESTS} --output-tokens-mean {TOKENS}"
    command += f" --synthetic-input-tokens-mean 30 --artifact-dir {folder}"
    environment = os.environ | {"HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    done = subprocess.run(
        command.split(), env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.rglob("profile_export_aiperf.json")
    found = json.loads(file.read_text())
    names = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}
    return {ours: found[theirs]["p50"] / 1000 for ours, theirs in names.items()}


def own_medians(url: str, file: Path) -> dict[str, float]:
    words = ["bench", "--url", url, "--concurrency", "4", "--limit", str(REQUESTS)]
    words += ["--prompt", "constant:30", "--output", f"constant:{TOKENS}", "--json", str(file)]
    assert main.main(words) == 0
    found: JsonObject = json.loads(file.read_text())
    return {name: found[f"{name}_s"]["p50"] for name in ("ttft", "tpot", "e2e")}


def test_both_clients_measure_the_same(tmp_path: Path) -> None:
    if not AIPERF.exists():
        pytest.skip("build/clients/aiperf is absent: run `make build/clients/aiperf`")
    with openai_stub(lambda number, body: Script(TTFT_S, GAP_S)) as stub:
        theirs = aiperf_medians(stub.url, tmp_path)
        ours = own_medians(stub.url, tmp_path / "report.json")
    known = {"ttft": TTFT_S, "tpot": GAP_S, "e2e": TTFT_S + (TOKENS - 1) * GAP_S}
    assert ours == pytest.approx(known, rel=0.03)
    assert ours == pytest.approx(theirs, rel=0.03)
