"""The timing model: its formulas by hand, its fit, its files."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.planner.measured_points import PointFilter, read_points
from baton.planner.timing_file import fit_from_json, fit_to_json, read_fit, read_samples, write_fit
from baton.planner.timing_fit import (
    Fit,
    TimingSample,
    fit_lines,
    fit_timing,
    non_negative_least_squares,
)
from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    HostTiming,
    Roofline,
    StepTiming,
    StepWork,
    TimingModel,
    TransferTiming,
)
from baton.runtime.errors import ConfigError
from baton.runtime.worker.attention_pairs import causal_pairs
from tests.support.shared_traces import shared_trace

MODEL = TimingModel(
    "by hand",
    kv_bytes_per_token=1000,
    chunk=ChunkTiming(0.010, 1e-4),
    step=StepTiming(0.004, 1e-3),
    attention=AttentionTiming(1e-8, 1e-6),
    transfer=TransferTiming(0.001, 1e-9),
    host=HostTiming(0.002, 1e-6),
)


def samples(noise: float, seed: int = 1) -> list[TimingSample]:
    rng = random.Random(seed)
    found = []
    for _ in range(60):
        tokens, rows = rng.randint(16, 8192), rng.randint(1, 128)
        pairs, context = float(causal_pairs(0, tokens)), float(rows * rng.randint(10, 8000))
        chunk_s = 0.010 + 1e-4 * tokens + 1e-8 * pairs
        step_s = 0.004 + 1e-3 * rows + 1e-6 * context
        size = float(rng.randint(1, 1 << 30))
        for kind, amounts, seconds in (
            ("chunk", (float(tokens), pairs), chunk_s),
            ("step", (float(rows), context), step_s),
            ("transfer", (size,), 0.001 + 1e-9 * size),
            ("host", (float(tokens),), 0.002 + 1e-6 * tokens),
        ):
            found.append(TimingSample(kind, amounts, seconds * rng.uniform(1 - noise, 1 + noise)))
    return found


def test_step_time_of_each_kind_of_work_by_hand() -> None:
    chunk = StepWork(prompt_tokens=100, pairs=5050)
    assert MODEL.step_s(chunk) == pytest.approx(0.010 + 0.01 + 5050e-8)
    decode = StepWork(sequences=2, context_tokens=300)
    assert MODEL.step_s(decode) == pytest.approx(0.004 + 0.002 + 300e-6)
    both = StepWork(100, 5050, 2, 300)
    assert MODEL.step_s(both) == pytest.approx(0.010 + 0.01 + 5050e-8 + 0.002 + 300e-6)
    assert MODEL.transfer_s(10) == pytest.approx(0.001 + 1e-5)
    assert MODEL.host_s(1000) == pytest.approx(0.003)


def test_run_of_decode_steps_is_the_sum_of_its_steps() -> None:
    context, total = 300, 0.0
    for _ in range(7):
        total += MODEL.step_s(StepWork(sequences=3, context_tokens=context))
        context += 3
    assert MODEL.decode_run_s(3, 300, 7) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 5), (3, 9), (7, 7)])
def test_causal_pairs_equal_a_count(start: int, end: int) -> None:
    assert causal_pairs(start, end) == sum(index + 1 for index in range(start, end))


def test_no_step_is_faster_than_the_roofline() -> None:
    bound = Roofline(1e9, 1e6, 2e9, 1e12, 1e11)
    model = TimingModel("bound", 1000, ChunkTiming(0, 1e-9), StepTiming(1e-9, 0), roofline=bound)
    compute = StepWork(prompt_tokens=100, pairs=5050)
    assert model.step_s(compute) == pytest.approx((2e9 * 100 + 1e6 * 5050) / 1e12)
    memory = StepWork(sequences=1, context_tokens=1_000_000)
    assert model.step_s(memory) == pytest.approx((2e9 + 1e9) / 1e11)


def test_fit_finds_the_coefficients_of_exact_samples() -> None:
    fit = fit_timing("exact", 1000, samples(noise=0))
    assert fit.model.chunk.per_token_s == pytest.approx(1e-4, rel=1e-6)
    assert fit.model.step.fixed_s == pytest.approx(0.004, rel=1e-6)
    assert fit.model.step.per_sequence_s == pytest.approx(1e-3, rel=1e-6)
    assert fit.model.attention.per_pair_s == pytest.approx(1e-8, rel=1e-6)
    assert fit.model.attention.per_context_token_s == pytest.approx(1e-6, rel=1e-6)
    assert fit.model.transfer.per_byte_s == pytest.approx(1e-9, rel=1e-6)
    assert all(error.p90 < 1e-6 and error.samples == 60 for error in fit.errors.values())


def test_fit_error_is_of_the_size_of_the_noise() -> None:
    errors = fit_timing("noisy", 1000, samples(noise=0.1)).errors
    assert set(errors) == {"chunk", "step", "transfer", "host"}
    for error in errors.values():
        assert 0.01 < error.median < 0.1 and error.median <= error.p90 < 0.2


def test_attention_measured_alone_is_used_in_chunks_and_steps() -> None:
    alone = [
        TimingSample("attention", (float(p), float(c)), 2e-8 * p + 3e-6 * c)
        for p, c in ((1000, 10), (50_000, 400), (9, 5000))
    ]
    attention = fit_timing("alone", 1000, samples(noise=0) + alone).model.attention
    assert attention.per_pair_s == pytest.approx(2e-8)
    assert attention.per_context_token_s == pytest.approx(3e-6)


def test_least_squares_keeps_coefficients_at_zero_or_above() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        rows, values = rng.normal(size=(12, 4)), rng.normal(size=12)
        x = non_negative_least_squares(rows, values)
        assert (x >= 0).all()
        gradient = rows.T @ (values - rows @ x)  # the conditions of Karush, Kuhn and Tucker
        assert np.allclose(gradient[x > 0], 0, atol=1e-8)
        assert (gradient[x == 0] <= 1e-8).all()


def test_fit_refuses_too_few_samples() -> None:
    with pytest.raises(ConfigError, match="2 samples of kind 'chunk', and its fit needs 3"):
        fit_timing("few", 1000, samples(0)[:8])


def test_fit_refuses_chunks_of_one_length() -> None:
    equal = [TimingSample("chunk", (512.0, 131_328.0), 0.02 + n * 1e-4) for n in range(9)]
    others = [each for each in samples(0) if each.kind != "chunk"]
    with pytest.raises(ConfigError, match="have 512 tokens, .* prompts of different lengths"):
        fit_timing("equal", 1000, equal + others)


def test_a_model_of_one_term_is_read_and_of_none_not_written(tmp_path: Path) -> None:
    """Recorded steps of one length have a fit without a time for each token."""
    flat = replace(MODEL, chunk=ChunkTiming(0.02), attention=AttentionTiming())
    write_fit(Fit(flat), tmp_path / "flat.json")
    assert read_fit(tmp_path / "flat.json").model == flat
    assert "needs prompts of different lengths" in fit_lines(Fit(flat))[-1]
    assert all("different" not in line for line in fit_lines(Fit(MODEL)))
    with pytest.raises(ConfigError, match="the fit: all times of kind 'chunk' are 0"):
        write_fit(Fit(replace(flat, chunk=ChunkTiming())), tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()


def test_model_survives_its_file(tmp_path: Path) -> None:
    fit = fit_timing("kept", 1000, samples(noise=0.05), Roofline(parameters=7e9))
    write_fit(fit, tmp_path / "timing.json")
    assert read_fit(tmp_path / "timing.json") == fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 1}, "unknown field speed"),
        ({"chunk": {"per_tokens_s": 1}}, "unknown field chunk.per_tokens_s"),
        ({"chunk": {"per_token_s": -1}}, "chunk.per_token_s is -1"),
        ({"chunk": {"per_token_s": True}}, "chunk.per_token_s has to be a number, not bool"),
        ({"chunk": {"per_token_s": float("nan")}}, "chunk.per_token_s is nan"),
        ({"chunk": {"per_token_s": 10**400}}, "chunk.per_token_s is 10{39}; it has to be finite"),
        ({"chunk": {}, "attention": {}}, "all times of kind 'chunk' are 0"),
        ({"step": {}, "attention": {}}, "all times of kind 'step' are 0"),
        ({"step": []}, "step has to be a JSON object, not list"),
        ({"name": ""}, "name has to be 1 to 200 characters"),
        ({"errors": {"chunk": {"samples": 1}}}, "field errors.chunk.median is missing"),
        ({"errors": {"other": {}}}, "errors.other is not one of"),
    ],
)
def test_wrong_model_file_names_the_field(change: dict[str, object], message: str) -> None:
    values = fit_to_json(fit_timing("x", 1000, samples(0))) | change
    with pytest.raises(ConfigError, match="t.json: .*" + message):
        fit_from_json(values, "t.json")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2 is not JSON"),
        ("[1]", ":2: a sample has to be a JSON object"),
        ('{"kind": ["chunk"]}', ":2: kind is .* not one of"),
        ('{"kind": "chunk", "tokens": 1, "seconds": 1}', ":2: the field pairs is missing"),
        ('{"kind": "host", "tokens": 1, "seconds": 0}', ":2: seconds is 0"),
        ('{"kind": "host", "tokens": 1e400, "seconds": 1}', ":2: tokens is inf"),
    ],
)
def test_wrong_sample_names_line_and_field(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text('{"kind": "host", "tokens": 1, "seconds": 1}\n' + line)
    with pytest.raises(ConfigError, match=message):
        read_samples(file)


def test_samples_are_read_in_the_order_of_their_amounts(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    line = {"seconds": 0.5, "context_tokens": 30, "kind": "step", "sequences": 2}
    file.write_text(json.dumps(line) + "\n\n")
    assert read_samples(file) == [TimingSample("step", (2.0, 30.0), 0.5)]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "binary", tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            read_fit(path)


def test_fit_of_published_points_of_an_h200() -> None:
    points = shared_trace("aic-h200/silicon_sample.csv")
    chosen = PointFilter("meta-llama/Llama-3.1-70B", tensor_parallel=4)
    fit = fit_timing("Llama 3.1 70B on four H200", 163_840, read_points(points, chosen))
    assert fit.errors["step"].samples == 15
    assert fit.errors["step"].median < 0.10
    assert fit.errors["chunk"].median < 0.10
    assert 5e-6 < fit.model.chunk.per_token_s < 1e-4


def test_points_of_another_table_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "points.csv"
    table.write_text("isl,osl\n1,2\n")
    with pytest.raises(ConfigError, match="lacks the columns backend, batch_size"):
        read_points(table, PointFilter("m"))
    header = "model_path,system,backend,tp_size,mode,isl,osl,batch_size,"
    header += "silicon_ttft_ms,silicon_tpot_ms\n"
    table.write_text(header + "m,h200_sxm,vllm,1,agg,1,2,3,x,5\n")
    with pytest.raises(ConfigError, match=":2: silicon_ttft_ms is 'x'"):
        read_points(table, PointFilter("m"))
    with pytest.raises(ConfigError, match="has no row"):
        read_points(table, PointFilter("other"))
