"""Logs of other systems, and the timing models that are fitted to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    HostTiming,
    StepTiming,
    StepWork,
    TimingModel,
    TransferTiming,
)
from baton.planner.trace_distributions import draw_trace
from baton.runtime.worker.attention_pairs import causal_pairs
from benchmarks.simulator.logged_systems import SYSTEMS, halves, logs_of, predictions
from benchmarks.simulator.measured_logs import LoggedRequest, RateLog, fit_logs, read_log
from benchmarks.simulator.other_schedulers import replay
from tests.support.json_values import JsonObject
from tests.support.shared_traces import shared_trace

TRAFFIC = "requests=300,rate={rate},prompt=lognormal:500:0.7,output=lognormal:100:0.8"
KV_BYTES = 1000.0
TIMING = TimingModel(
    "known",
    KV_BYTES,
    ChunkTiming(0.02, 7e-5),
    StepTiming(0.02, 3e-4),
    AttentionTiming(1e-8, 4e-7),
    TransferTiming(0.008, 1e-8),
)
POOL_BLOCKS = 4000


def entry(issued_s: float, prompt: int, first_s: float, end_s: float, output: int) -> JsonObject:
    """Return a request of a log, whose clock began long ago."""
    return {
        "prompt_len": prompt,
        "output_len": output,
        "issue_time": 9000.0 + issued_s,
        "first_token_time": 9000.0 + first_s,
        "complete_time": 9000.0 + end_s,
        "ttft_ms": 0.0,
        "tpot_ms": 0.0,
    }


ENTRIES = [
    entry(0.0, 100, 0.1, 2.1, 21),
    entry(1.0, 300, 1.3, 5.3, 41),
    entry(9.0, 50, 9.2, 9.3, 2),
    entry(9.1, 60, 9.4, 9.5, 2),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rate in (4, 2.5, 8):
        text = repr(list(reversed(ENTRIES))) + "\n{'a second': 'line'}\n"
        (tmp_path / f"vllm-4-{rate}.exp").write_text(text)
    (tmp_path / "vllm-2-4.exp").write_text(repr(ENTRIES[:2]))
    return tmp_path


def log_of(timing: TimingModel, rate: float, context_blocks: int) -> RateLog:
    """Return the log of a system that has this timing."""
    done, _ = replay(draw_trace(TRAFFIC.format(rate=rate)), timing, POOL_BLOCKS, context_blocks)
    requests = [
        LoggedRequest(
            each.request.prompt_tokens,
            each.request.output_tokens,
            each.request.arrived_s,
            each.first_s,
            each.end_s,
        )
        for each in done
    ]
    return RateLog(rate, tuple(requests))


def test_a_log_is_in_order_and_has_its_rate(folder: Path) -> None:
    log = read_log(folder / "vllm-4-2.5.exp")
    issued = [each.arrived_s for each in log.traffic()]
    assert log.rate == 2.5 and issued == pytest.approx([0.0, 1.0, 9.0, 9.1])


def test_most_tokens_are_those_held_at_once(folder: Path) -> None:
    # at 1.3 s: 100 of the first prompt with 1 + 12 tokens, and 301 of the second
    assert read_log(folder / "vllm-4-4.exp").most_tokens() == 100 + 13 + 301


def test_logs_of_one_rate_are_in_one_half(folder: Path) -> None:
    logs = logs_of(folder, next(each for each in SYSTEMS if each.name == "vllm"))
    assert [(log.rate, len(log.requests)) for log in logs] == [(2.5, 4), (4, 2), (4, 4), (8, 4)]
    fitted, judged = halves(logs)
    assert [log.rate for log in fitted] == [2.5, 8] and [log.rate for log in judged] == [4, 4]


def test_a_folder_with_one_rate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vllm-4-4.exp").write_text(repr(ENTRIES))
    with pytest.raises(ValueError, match="1 logs of vllm: two rates are needed"):
        logs_of(tmp_path, next(each for each in SYSTEMS if each.name == "vllm"))


@pytest.mark.parametrize("context_blocks", [0, 8000])
def test_a_fit_finds_the_times_that_made_a_log(context_blocks: int) -> None:
    known = [log_of(TIMING, rate, context_blocks) for rate in (1, 3)]
    fitted = fit_logs("again", KV_BYTES, known, POOL_BLOCKS * 16, together=not context_blocks)
    # prompts of 500 tokens, steps of 10 sequences that read 6,000 tokens
    for prompt in (100, 500, 1500):
        work = StepWork(prompt, causal_pairs(0, prompt))
        seconds = fitted.host.fixed_s + fitted.step_s(work)
        assert seconds == pytest.approx(TIMING.step_s(work), rel=0.12)
    for sequences in (2, 10):
        assert fitted.decode_run_s(sequences, 600 * sequences, 1) == pytest.approx(
            TIMING.decode_run_s(sequences, 600 * sequences, 1), rel=0.03
        )
    if context_blocks:
        assert fitted.transfer_s(500) == pytest.approx(TIMING.transfer_s(500), rel=0.4)


def test_requests_beside_a_full_pool_do_not_count() -> None:
    logs = [log_of(TIMING, rate, 8000) for rate in (3, 12)]
    fitted = fit_logs("again", KV_BYTES, logs, POOL_BLOCKS * 16, together=False)
    everyone = fit_logs("again", KV_BYTES, logs, 1 << 30, together=False)
    right = TIMING.decode_run_s(40, 24_000, 1)
    assert fitted.decode_run_s(40, 24_000, 1) == pytest.approx(right, rel=0.06)
    assert everyone.decode_run_s(40, 24_000, 1) < 0.93 * right  # too many seem to run


def test_a_host_time_that_holds_up_no_other_is_found() -> None:
    own = TimingModel(
        "own",
        KV_BYTES,
        ChunkTiming(0.01, 2e-4),
        TIMING.step,
        host=HostTiming(0.04),
    )
    system = next(each for each in SYSTEMS if each.name == "distserve_c21d11")
    logs = [log_of(own, rate, 8000) for rate in (3, 5, 6)]
    found = predictions(system, logs[::2], logs[1::2])
    assert [each.rate for each in found] == [5]
    assert abs(found[0].errors.ttft_s) < 0.05 and abs(found[0].errors.tpot_s) < 0.05


def test_vllm_on_a100_is_predicted_at_a_rate_not_fitted() -> None:
    folder = shared_trace("distserve-a100")
    system = next(each for each in SYSTEMS if each.name == "vllm")
    (found,) = predictions(system, *halves(logs_of(folder, system)))
    assert found.rate == 3 and found.error < 0.08
