"""Fits a timing model to measured samples, and states the error of each part, also as text.

    samples ─▶ attention, if it was measured alone ─▶ chunk and step without it ─▶ transfer, host

Each kind is a linear model with coefficients of zero or more: a negative cost of a token is
noise, and a simulation of it would reward work. Rows are divided by their measured time, so that
the sum of squared *relative* errors is the least. The method is the active set of Lawson and
Hanson (Solving Least Squares Problems, 1974, chapter 23). Pure: numpy alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    HostTiming,
    Roofline,
    StepTiming,
    TimingModel,
    TransferTiming,
)
from baton.runtime.errors import ConfigError

# The measured amounts of each kind of sample, in their order; units as in timing_model.py.
AMOUNTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("pairs", "context_tokens"),
    "chunk": ("tokens", "pairs"),
    "step": ("sequences", "context_tokens"),
    "transfer": ("bytes",),
    "host": ("tokens",),
}
REQUIRED = ("chunk", "step")
FREE_KINDS = ("transfer", "host")  # cost nothing where they were not measured
TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True)
class TimingSample:
    """One measurement: `amounts` in the order of AMOUNTS[kind], and its seconds (> 0)."""

    kind: str
    amounts: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class FitError:
    """The relative errors of one kind over its own samples."""

    samples: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True)
class Fit:
    model: TimingModel
    errors: Mapping[str, FitError] = field(default_factory=dict)


def fit_timing(
    name: str,
    kv_bytes_per_token: float,
    samples: Sequence[TimingSample],
    roofline: Roofline | None = None,
) -> Fit:
    """Fit all kinds that were measured; the others cost nothing. Raises ConfigError without chunk
    or step samples, with fewer samples of a kind than it has coefficients, or if all chunks have
    the same length."""
    by_kind = {kind: [s for s in samples if s.kind == kind] for kind in AMOUNTS}
    for kind, found in by_kind.items():
        wanted = len(AMOUNTS[kind]) + (kind != "attention")
        if (found or kind in REQUIRED) and len(found) < wanted:
            raise ConfigError(
                f"{len(found)} samples of kind {kind!r}, and its fit needs {wanted} at least: "
                "record more of them"
            )
    lengths = {each.amounts[0] for each in by_kind["chunk"]}
    if len(lengths) == 1:
        raise ConfigError(
            f"all samples of kind 'chunk' have {lengths.pop():g} tokens, which does not tell what "
            "a token costs: measure prompts of different lengths"
        )
    attention = _fit_attention(by_kind["attention"])
    alone = (None, None) if attention is None else attention
    chunk, pair_s = _fit_beside(by_kind["chunk"], alone[0])
    step, context_s = _fit_beside(by_kind["step"], alone[1])
    model = TimingModel(
        name,
        kv_bytes_per_token,
        ChunkTiming(*chunk),
        StepTiming(*step),
        AttentionTiming(pair_s, context_s),
        TransferTiming(*fit_timing_line(by_kind["transfer"])),
        HostTiming(*fit_timing_line(by_kind["host"])),
        roofline or Roofline(),
    )
    errors = {kind: fit_error(model, found) for kind, found in by_kind.items() if found}
    return Fit(model, errors)


def fit_error(model: TimingModel, samples: Sequence[TimingSample]) -> FitError:
    """Return the relative errors of the coefficients over samples of one kind. The roofline is left
    out: a sample has only the amounts of its own part."""
    plain = replace(model, roofline=Roofline())
    errors = [abs(predicted_s(plain, each) - each.seconds) / each.seconds for each in samples]
    return FitError(len(errors), float(np.percentile(errors, 50)), float(np.percentile(errors, 90)))


def predicted_s(model: TimingModel, sample: TimingSample) -> float:
    """Return what the coefficients say of a sample."""
    chunk, step, attention = model.chunk, model.step, model.attention
    match sample.kind:
        case "attention":
            pairs, context = sample.amounts
            return attention.per_pair_s * pairs + attention.per_context_token_s * context
        case "chunk":
            tokens, pairs = sample.amounts
            return chunk.fixed_s + chunk.per_token_s * tokens + attention.per_pair_s * pairs
        case "step":
            rows, context = sample.amounts
            own = step.fixed_s + step.per_sequence_s * rows
            return own + attention.per_context_token_s * context
        case "transfer":
            return model.transfer.fixed_s + model.transfer.per_byte_s * sample.amounts[0]
        case _:
            return model.host.fixed_s + model.host.per_token_s * sample.amounts[0]


def non_negative_least_squares(
    rows: NDArray[np.float64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the x >= 0 that minimises |rows @ x - values|. rows: [samples, n], values: [samples].
    Columns are scaled to a norm of one first, since their units differ by twelve powers of ten."""
    norms = np.linalg.norm(rows, axis=0)
    norms[norms == 0] = 1.0
    scaled = rows / norms
    count = scaled.shape[1]
    free = np.zeros(count, dtype=bool)  # the coefficients that may be above zero
    x = np.zeros(count)
    for _ in range(3 * count + 3):
        gradient = scaled.T @ (values - scaled @ x)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if free.all() or gradient[best] <= TOLERANCE * float(np.linalg.norm(values)):
            break
        free[best] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(scaled[:, free], values, rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                x = trial
                break
            reach = x[below] / np.maximum(x[below] - trial[below], 1e-300)
            x = x + float(reach.min()) * (trial - x)
            free &= x > TOLERANCE
            x[~free] = 0.0
    return np.asarray(x / norms, dtype=np.float64)


def _fit_attention(samples: Sequence[TimingSample]) -> tuple[float, float] | None:
    if not samples:
        return None
    pairs, context = _solve([list(each.amounts) for each in samples], samples)
    return pairs, context


def _fit_beside(
    samples: Sequence[TimingSample], attention_s: float | None
) -> tuple[tuple[float, float], float]:
    """Return (fixed, per first amount) and the seconds of the second amount, which attention reads:
    `attention_s` where that was measured alone."""
    if attention_s is None:
        fixed, first, second = _solve([[1.0, *each.amounts] for each in samples], samples)
        return (fixed, first), second
    rest = [each.seconds - attention_s * each.amounts[1] for each in samples]
    fixed, first = _solve([[1.0, each.amounts[0]] for each in samples], samples, rest)
    return (fixed, first), attention_s


def fit_timing_line(samples: Sequence[TimingSample]) -> tuple[float, float]:
    """Fit (fixed, per amount) to samples of one amount; zeros without a sample."""
    if not samples:
        return 0.0, 0.0
    fixed, each = _solve([[1.0, *sample.amounts] for sample in samples], samples)
    return fixed, each


def _solve(
    rows: list[list[float]], samples: Sequence[TimingSample], rest: list[float] | None = None
) -> list[float]:
    seconds = np.array([each.seconds for each in samples])
    values = seconds if rest is None else np.array(rest)
    solved = non_negative_least_squares(np.array(rows) / seconds[:, None], values / seconds)
    return [float(each) for each in solved]


def fit_lines(fit: Fit, missing: tuple[str, ...] = ()) -> list[str]:
    """Return a table of the kinds with their errors and seconds, then what was not measured."""
    lines = [f"{'kind':<12}{'samples':>8}{'median error':>14}{'p90 error':>12}  seconds"]
    terms = _terms(fit.model)
    for kind, found in fit.errors.items():
        errors = f"{found.samples:>8}{found.median:>14.1%}{found.p90:>12.1%}"
        lines.append(f"{kind:<12}{errors}  {_sum(terms[kind])}")
    free = [kind for kind in FREE_KINDS if kind not in fit.errors]
    if free:
        lines.append(f"not measured, so it costs nothing: {', '.join(free)}")
    if not (fit.model.chunk.per_token_s or fit.model.attention.per_pair_s):
        lines.append(
            "a step costs the same for every length of its chunks: this fit needs prompts of "
            "different lengths"
        )
    lines += [f"not covered: {each}" for each in missing]
    return lines


def error_text(fit: Fit) -> str:
    """Return the median errors of a fit in words."""
    found = [f"{kind} {error.median:.1%}" for kind, error in fit.errors.items()]
    return f"median errors of its fit: {', '.join(found)}" if found else "its errors are unknown"


def _terms(model: TimingModel) -> Mapping[str, tuple[tuple[float, str], ...]]:
    attention = model.attention
    pairs, context = (
        (attention.per_pair_s, "pairs"),
        (attention.per_context_token_s, "context_tokens"),
    )
    return {
        "attention": (pairs, context),
        "chunk": ((model.chunk.fixed_s, ""), (model.chunk.per_token_s, "tokens"), pairs),
        "step": ((model.step.fixed_s, ""), (model.step.per_sequence_s, "sequences"), context),
        "transfer": ((model.transfer.fixed_s, ""), (model.transfer.per_byte_s, "bytes")),
        "host": ((model.host.fixed_s, ""), (model.host.per_token_s, "tokens")),
    }


def _sum(terms: tuple[tuple[float, str], ...]) -> str:
    return " + ".join(f"{value:.3g} {name}".rstrip() for value, name in terms)
