"""Timing models from tables of measured kernels."""

from __future__ import annotations

import numpy as np
import pytest

from baton.planner.kernel_times import (
    CONTEXT,
    GEMM,
    GENERATION,
    GemmTimes,
    RankForm,
    Table,
    attention_times,
    kernel_samples,
)
from baton.planner.timing_fit import fit_timing
from baton.runtime.errors import ConfigError
from baton.runtime.worker.attention_pairs import causal_pairs

FORM = RankForm(
    layers=4, hidden_size=256, heads=4, kv_heads=2, head_dim=64, ffn_size=512, vocab_size=2048
)
ROWS = (1, 16, 256, 1024, 4096)
SIZES = (128, 256, 512, 1024, 2048)
Row = dict[str, object]  # of a table that a measurement wrote


def table(rows: list[Row]) -> Table:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def product_ms(m: int, n: int, k: int) -> float:
    return 0.002 + 1e-9 * m * n * k


def gemm() -> Table:
    return table(
        [
            {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": product_ms(m, n, k)}
            for m in ROWS
            for n in SIZES
            for k in SIZES
        ]
    )


def attention(batch: int, tokens: int, before: int, ms: float, **other: object) -> Row:
    return {
        "batch_size": batch,
        "isl": tokens,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "kv_cache_dtype": "bfloat16",
        "step": before,
        "window_size": 0,
        "latency": ms,
    } | other


def context() -> Table:
    return table(
        [attention(1, n, 0, 0.01 + 1e-7 * causal_pairs(0, n)) for n in ROWS]
        + [attention(2, 16, 0, 9.0), attention(1, 16, 0, 9.0, window_size=128)]
    )


def generation() -> Table:
    return table(
        [
            attention(batch, 1, before, 0.01 + 1e-6 * batch * (before + 1))
            for batch in (1, 16, 512)
            for before in (15, 255, 4095)
        ]
    )


def test_a_measured_product_is_itself() -> None:
    times = GemmTimes(gemm(), "bfloat16")
    assert times.seconds(256, 512, 128) == pytest.approx(product_ms(256, 512, 128) / 1000)


def test_products_between_measured_sizes_are_between_their_times() -> None:
    times = GemmTimes(gemm(), "bfloat16")
    for m, n, k in ((600, 1024, 512), (1024, 700, 512), (1024, 512, 1500), (700, 900, 300)):
        assert times.seconds(m, n, k) == pytest.approx(product_ms(m, n, k) / 1000, rel=0.15)


def test_products_beyond_the_table_grow_with_the_matrix() -> None:
    times = GemmTimes(gemm(), "bfloat16")
    assert times.seconds(16, 20_480, 256) == pytest.approx(10 * times.seconds(16, 2048, 256))


def test_of_several_kernels_the_fastest_counts() -> None:
    rows: list[Row] = [
        {"gemm_dtype": "fp8", "m": 8, "n": 64, "k": 64, "latency": latency}
        for latency in (3.0, 1.0, 2.0)
    ]
    assert GemmTimes(table(rows), "fp8").seconds(8, 64, 64) == pytest.approx(0.001)


def test_a_dtype_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="no products in fp8: it has bfloat16"):
        GemmTimes(gemm(), "fp8")


def test_heads_that_were_not_measured_are_refused() -> None:
    other = RankForm(4, 256, 5, 5, 64, 512, 2048)
    with pytest.raises(ConfigError, match="no attention with num_heads 5, num_key_value_heads 5"):
        attention_times(context(), other)


def test_a_step_is_its_products_and_the_attention_of_each_layer() -> None:
    samples = kernel_samples({GEMM: gemm(), CONTEXT: context(), GENERATION: generation()}, FORM)
    chunks = {each.amounts[0]: each.seconds for each in samples if each.kind == "chunk"}
    assert sorted(chunks) == [16, 256, 1024, 4096]  # one token is no chunk
    layer_ms = sum(product_ms(256, n, k) for n, k in ((512, 256), (256, 256), (1024, 256)))
    layer_ms += product_ms(256, 256, 512) + 0.01 + 1e-7 * causal_pairs(0, 256)
    head_ms = product_ms(1, 2048, 256)
    assert chunks[256] == pytest.approx((4 * layer_ms + head_ms) / 1000)
    steps = {each.amounts for each in samples if each.kind == "step"}
    assert steps == {(b, b * c) for b in (1.0, 16.0) for c in (16.0, 256.0, 4096.0)}


def test_the_samples_fit_a_timing_model() -> None:
    samples = kernel_samples({GEMM: gemm(), CONTEXT: context(), GENERATION: generation()}, FORM)
    fit = fit_timing("kernels", 1000, samples)
    assert fit.errors["chunk"].p90 < 0.1 and fit.errors["step"].p90 < 0.1
    assert fit.model.attention.per_pair_s == pytest.approx(4 * 1e-10, rel=0.2)
    assert fit.model.attention.per_context_token_s == pytest.approx(4 * 1e-9, rel=0.2)
