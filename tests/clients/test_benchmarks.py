"""Benchmarks and evaluations of other projects, unchanged, against the fleet of `make demo`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.models.embedded import embedded_model

LM_EVAL_TASK = Path(__file__).parent / "lmeval"
TOKENIZER = embedded_model()

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]


def test_aiperf_measures_streams_of_min_tokens(
    run_client: Callable[..., str], tmp_path: Path
) -> None:
    command = "aiperf profile --model baton-tiny --url {url} --endpoint-type chat --streaming"
    command += f" --tokenizer {TOKENIZER} --concurrency 2 --request-count 6 --ui simple"
    command += " --synthetic-input-tokens-mean 30 --output-tokens-mean 24"
    command += f" --extra-inputs min_tokens:24 --artifact-dir {tmp_path}"
    run_client("aiperf", *command.split(), timeout_s=200)
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    figures = json.loads(report.read_text())
    assert figures["request_count"]["avg"] == 6
    assert figures["output_sequence_length"]["min"] >= 24
    assert figures["time_to_first_token"]["avg"] > 0


def test_guidellm_finishes_every_request(run_client: Callable[..., str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = "guidellm run --backend kind=openai_http,target={url} --profile kind=synchronous"
    command += " --constraint kind=max_requests,count=4 --disable-console-interactive"
    command += " --data kind=synthetic_text,prompt_tokens=30,output_tokens=8"
    command += f" --tokenizer kind=hf_auto,model={TOKENIZER} --output kind=json,path={report}"
    run_client("guidellm", *command.split(), timeout_s=200)
    (run,) = json.loads(report.read_text())["benchmarks"]
    assert (len(run["requests"]["successful"]), len(run["requests"]["errored"])) == (4, 0)


def test_lm_eval_scores_a_multiple_choice_task(
    run_client: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scores are the log-probabilities of echoed prompts, and baton-tiny knows its days."""
    monkeypatch.chdir(LM_EVAL_TASK)
    arguments = "base_url={url}/v1/completions,model=baton-tiny,tokenizer_backend=huggingface"
    arguments += f",tokenizer={TOKENIZER},num_concurrent=2"
    command = f"lm_eval run --model local-completions --model_args {arguments} --tasks days"
    command += f" --include_path . --apply_chat_template --output_path {tmp_path}"
    run_client("lmeval", *command.split(), timeout_s=200)
    (report,) = tmp_path.rglob("results_*.json")
    assert json.loads(report.read_text())["results"]["days"]["acc,none"] >= 0.85
