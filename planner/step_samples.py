"""Steps of running workers as samples of a timing model: chunks, decode steps, and both in one.

A step of a decode worker may hold chunks of prompts beside the sequences that it decodes, so the
parts cannot be fitted one after the other as timing_fit.py does with samples of one kind. All steps
are fitted together, each with the fixed time that it has: that of a chunk, of a decode step, or,
with both, the larger one: the better of two fits.

Times of a running fleet have a long tail. How they grow with the work is what most steps say: an
error beyond TAIL of the fitted time counts by its size, not by its square (Huber, Annals of
Mathematical Statistics 35, 1964), or one step that waited for a connection would set the price of a
sequence. Weights follow the fitted times, not the measured ones as in timing_fit.py, which would
fit the quick steps (iteratively reweighted least squares). Queues depend on the mean: so the
coefficients are then scaled until the steps of each kind take in sum what was measured. A stall,
such as a first step that compiles a kernel, is left out: it takes STALL times what a fit of the
quick steps says. Pure: numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.planner.timing_fit import (
    Fit,
    FitError,
    TimingSample,
    fit_error,
    fit_timing_line,
    non_negative_least_squares,
)
from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    HostTiming,
    StepTiming,
    StepWork,
    TimingModel,
    TransferTiming,
)
from baton.runtime.errors import ConfigError

_Array = NDArray[np.float64]

MIN_STEPS = 8  # of each kind that is needed
FIT_ROUNDS = 8
TAIL = 0.5  # relative error
STALL = 8.0  # times the fitted time
OF_PROMPTS = np.array([True, False, True, True, False, False])  # columns of a row


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The settings of a worker's steps, as runtime/config.py names them."""

    prefill_tokens: int
    chunk_tokens: int
    local_prefill_tokens: int
    max_sequences: int


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step of a worker: its work and its time in seconds."""

    work: StepWork
    seconds: float


def step_sample(row: Sequence[float]) -> StepSample:
    """Return the sample of a row of a worker's step log."""
    tokens, pairs, sequences, context, seconds = row
    return StepSample(StepWork(int(tokens), pairs, int(sequences), context), seconds)


def fit_steps_together(
    name: str,
    kv_bytes_per_token: float,
    steps: Sequence[StepSample],
    others: Sequence[TimingSample] = (),
) -> Fit:
    """Fit all steps, and the transfer and host samples among `others`. The errors are those of the
    steps with prompt tokens (chunk) and of those without (step), and of what `others` has. Raises
    ConfigError with too few steps of either."""
    timed = [each for each in steps if each.seconds > 0]
    chunks = [each for each in timed if each.work.prompt_tokens]
    plain = [each for each in timed if not each.work.prompt_tokens]
    for found, what in ((chunks, "computed prompts"), (plain, "only decoded")):
        if len(found) < MIN_STEPS:
            raise ConfigError(
                f"{len(found)} of the last steps of the workers {what}, and a fit needs "
                f"{MIN_STEPS}: ask again when there was more traffic"
            )
    fitted = [
        _fitted(name, kv_bytes_per_token, timed, mixed_as_chunk=each) for each in (False, True)
    ]
    model = min(fitted, key=lambda each: _error(each, timed).median)
    errors = {"chunk": _error(model, chunks), "step": _error(model, plain)}
    model = _with_lines(model, others)
    for kind in ("transfer", "host"):
        if samples := [sample for sample in others if sample.kind == kind]:
            errors[kind] = fit_error(model, samples)
    return Fit(model, errors)


def _with_lines(model: TimingModel, others: Sequence[TimingSample]) -> TimingModel:
    transfer, host = (
        fit_timing_line([each for each in others if each.kind == kind])
        for kind in ("transfer", "host")
    )
    return TimingModel(
        model.name,
        model.kv_bytes_per_token,
        model.chunk,
        model.step,
        model.attention,
        TransferTiming(*transfer),
        HostTiming(*host),
    )


def _fitted(
    name: str, kv_bytes_per_token: float, steps: Sequence[StepSample], *, mixed_as_chunk: bool
) -> TimingModel:
    rows = np.array([_row(each.work, mixed_as_chunk=mixed_as_chunk) for each in steps])
    seconds = np.array([each.seconds for each in steps])
    quick = rows @ non_negative_least_squares(rows / seconds[:, None], np.ones(len(steps)))
    kept = seconds <= STALL * np.maximum(quick, seconds.min())
    rows, seconds = rows[kept], seconds[kept]
    solved = _levelled(_usual(rows, seconds), rows, seconds)
    chunk_s, step_s, token_s, pair_s, sequence_s, context_s = (float(each) for each in solved)
    return TimingModel(
        name,
        kv_bytes_per_token,
        ChunkTiming(chunk_s, token_s),
        StepTiming(step_s, sequence_s),
        AttentionTiming(pair_s, context_s),
    )


def _usual(rows: _Array, seconds: _Array) -> _Array:
    """Return the coefficients, [6], of most steps. rows: [steps, 6], seconds: [steps]."""
    weights = 1 / seconds
    for _ in range(FIT_ROUNDS):
        solved = non_negative_least_squares(rows * weights[:, None], seconds * weights)
        fitted = np.maximum(rows @ solved, seconds.min())
        error = np.abs(seconds / fitted - 1)
        weights = 1 / (fitted * np.sqrt(np.maximum(1.0, error / TAIL)))
    return solved


def _levelled(solved: _Array, rows: _Array, seconds: _Array) -> _Array:
    """Return the coefficients with which the steps that only decode take in sum what was measured,
    and then those with prompt tokens."""
    prompts = rows[:, 2] > 0
    decoding = np.where(OF_PROMPTS, 0.0, solved)
    decoding *= _scale(rows[~prompts] @ decoding, seconds[~prompts])
    computing = np.where(OF_PROMPTS, solved, 0.0)
    beside = rows[prompts] @ decoding
    return decoding + computing * _scale(rows[prompts] @ computing, seconds[prompts] - beside)


def _scale(fitted: _Array, measured: _Array) -> float:
    total = float(fitted.sum())
    return max(0.0, float(measured.sum())) / total if total else 1.0


def _row(work: StepWork, *, mixed_as_chunk: bool) -> list[float]:
    chunk = bool(work.prompt_tokens) and (mixed_as_chunk or not work.sequences)
    amounts = [work.prompt_tokens, work.pairs, work.sequences, work.context_tokens]
    return [float(chunk), float(not chunk), *map(float, amounts)]


def _error(model: TimingModel, steps: Sequence[StepSample]) -> FitError:
    errors: _Array = np.array([abs(model.step_s(each.work) / each.seconds - 1) for each in steps])
    return FitError(len(errors), float(np.percentile(errors, 50)), float(np.percentile(errors, 90)))
