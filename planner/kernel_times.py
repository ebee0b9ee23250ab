"""Samples of a timing model from tables of measured kernels: matrix products and attention.

    chunk of n tokens    layers * (products of a layer at n rows + attention of n tokens)
                         + the head's product at one row
    step of B sequences  the same at B rows, with attention over each sequence's KV, + the head's

The tables are aiconfigurator's (ai-dynamo/aiconfigurator, Apache-2.0), one row a measurement,
`latency` in milliseconds:

    gemm                   gemm_dtype, m rows times a matrix of n by k
    context_attention      num_heads, num_key_value_heads, head_dim of one rank, batch_size, isl
    generation_attention   the same, and `step`: the tokens of KV before the one that is computed

A step has more than these kernels: NOT_COVERED says what. Pure: numpy alone; deploy/ reads files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.planner.timing_fit import TimingSample
from baton.runtime.errors import ConfigError
from baton.runtime.worker.attention_pairs import causal_pairs

GEMM, CONTEXT, GENERATION = "gemm", "context_attention", "generation_attention"
_ATTENTION = (
    "batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "step",
    "window_size", "latency",
)  # fmt: skip
COLUMNS: Mapping[str, tuple[str, ...]] = {
    GEMM: ("gemm_dtype", "m", "n", "k", "latency"),
    CONTEXT: _ATTENTION,
    GENERATION: _ATTENTION,
}
NOT_COVERED = (
    "norms, rotation, activation and residual sums of a step",
    "sampling, grammars, and the host's work between kernels",
    "transfer of KV, and the router's time of a request",
)
BETWEEN_RANKS = "sums between ranks"
MIN_CHUNK = 16  # tokens
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # sequences of a step

Table = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class RankForm:
    """The matrices and heads of one rank of a dense model with a gated feed-forward layer. Dtypes
    are those of the tables: bfloat16, fp8, fp8_block."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    gemm_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    def matrices(self) -> Iterator[tuple[int, int]]:
        """Yield (n, k) of the products of a layer."""
        queries = self.heads * self.head_dim
        yield queries + 2 * self.kv_heads * self.head_dim, self.hidden_size
        yield self.hidden_size, queries
        yield 2 * self.ffn_size, self.hidden_size
        yield self.hidden_size, self.ffn_size


class GemmTimes:
    """Seconds of a product of [m, k] and [k, n], between measured sizes by straight lines of the
    logarithms; beyond the largest n or k in proportion to it. Of several kernels the fastest."""

    def __init__(self, table: Table, dtype: str) -> None:
        """Raises ConfigError if the table has no product of this dtype."""
        rows = table["gemm_dtype"] == dtype
        if not rows.any():
            known = ", ".join(sorted({str(each) for each in table["gemm_dtype"]}))
            raise ConfigError(f"the table has no products in {dtype}: it has {known}")
        found: dict[tuple[int, int], dict[int, float]] = {}
        columns = (table[name][rows] for name in ("m", "n", "k", "latency"))
        for m, n, k, latency in zip(*columns, strict=True):
            sizes = found.setdefault((int(n), int(k)), {})
            sizes[int(m)] = min(float(latency) / 1000, sizes.get(int(m), np.inf))
        self._lines = {
            size: (np.log(sorted(times)), np.log([times[m] for m in sorted(times)]))
            for size, times in found.items()
        }
        self._rows = sorted({n for n, _ in found})
        self._columns = sorted({k for _, k in found})

    def seconds(self, m: int, n: int, k: int) -> float:
        """Return the seconds of one product."""
        total = weights = 0.0
        for row, row_weight in _between(self._rows, n):
            for column, column_weight in _between(self._columns, k):
                line, weight = self._lines.get((row, column)), row_weight * column_weight
                if line is not None and weight:
                    total += weight * float(np.interp(np.log(m), *line))
                    weights += weight
        if not weights:
            raise ConfigError(f"the table has no product near a matrix of {n} by {k}")
        beyond = max(1.0, n / self._rows[-1]) * max(1.0, k / self._columns[-1])
        return beyond * float(np.exp(total / weights))


def _between(sizes: list[int], size: int) -> list[tuple[int, float]]:
    """Return the measured sizes around one, each with its weight."""
    at = int(np.searchsorted(sizes, size))
    if at == len(sizes):
        return [(sizes[-1], 1.0)]
    if sizes[at] == size or at == 0:
        return [(sizes[at], 1.0)]
    below, above = sizes[at - 1], sizes[at]
    share = float(np.log(size / below) / np.log(above / below))
    return [(below, 1 - share), (above, share)]


def attention_times(table: Table, form: RankForm) -> dict[tuple[int, int, int], float]:
    """Return the seconds of attention in one layer, by (batch, tokens of each prompt, tokens of KV
    before them). Raises ConfigError if the table lacks these heads."""
    wanted = {
        "num_heads": form.heads,
        "num_key_value_heads": form.kv_heads,
        "head_dim": form.head_dim,
        "kv_cache_dtype": form.kv_dtype,
        "window_size": 0,
    }
    rows = np.logical_and.reduce([table[name] == value for name, value in wanted.items()])
    if not rows.any():
        text = ", ".join(f"{name} {value}" for name, value in wanted.items())
        raise ConfigError(
            f"the table has no attention with {text}: give another --tp, --cache-dtype or --backend"
        )
    found: dict[tuple[int, int, int], float] = {}
    columns = (table[name][rows] for name in ("batch_size", "isl", "step", "latency"))
    for batch, tokens, before, latency in zip(*columns, strict=True):
        key = (int(batch), int(tokens), int(before))
        found[key] = min(float(latency) / 1000, found.get(key, np.inf))
    return found


def kernel_samples(tables: Mapping[str, Table], form: RankForm) -> list[TimingSample]:
    """Return a chunk sample for each prompt length of the tables, one prompt at a time, and a step
    sample for each batch and context."""
    gemm = GemmTimes(tables[GEMM], form.gemm_dtype)

    def products_s(rows: int, drawn: int) -> float:
        layer = sum(gemm.seconds(rows, n, k) for n, k in form.matrices())
        return form.layers * layer + gemm.seconds(drawn, form.vocab_size, form.hidden_size)

    samples = []
    for (batch, tokens, before), layer_s in attention_times(tables[CONTEXT], form).items():
        if batch == 1 and not before and tokens >= MIN_CHUNK:
            seconds = products_s(tokens, 1) + form.layers * layer_s
            pairs = float(causal_pairs(0, tokens))
            samples.append(TimingSample("chunk", (float(tokens), pairs), seconds))
    steps_s = {batch: products_s(batch, batch) for batch in BATCHES}
    for (batch, _, before), layer_s in attention_times(tables[GENERATION], form).items():
        if batch in steps_s:
            amounts = (float(batch), float(batch * (before + 1)))
            seconds = steps_s[batch] + form.layers * layer_s
            samples.append(TimingSample("step", amounts, seconds))
    return samples
