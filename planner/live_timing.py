"""The timing model of workers that are alike, from the steps and handoffs that they report.

    step ─▶ its relative error against the model, squared, into the sums of a least squares fit
    fit  ─▶ the coefficients of zero or more with the least sum, the older steps counting less
    handoffs ─▶ medians of their fixed time, and of a byte's, by the distance of the workers; those
                of long ago count less

A prediction is wanted from the first request on, so there is a prior: times of a model of eight
billion parameters on a datacentre GPU, of which only the ratios matter while nothing is measured.
The fit is drawn towards the prior, scaled to the median step of each kind: steps that are all alike
cannot tell a fixed time from one that grows with the tokens. Squares are divided by those of
predicted times, as in step_samples.py and for the same reason; that fits a whole sample with numpy
in 30 ms, this one takes 0.2 ms beside a router's requests.

A router learns what handoffs take from handoffs alone, and hands no prompt over where they seem to
take too long. So one minute after the last of them their times begin to return to the prior's, by
half in each minute more: the worse they were, the later a prompt is handed over again, and that
one is believed as it is.

The minimum is approached by coordinate descent with projection on zero or more: the sums are those
of a positive definite form, for which that converges (Bertsekas, Nonlinear Programming, 2.7). Pure:
time is given.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import mul
from statistics import median

from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    StepTiming,
    StepWork,
    TimingModel,
    TransferTiming,
)

KEPT_RATIOS = 16  # of steps of each kind to the prior's
KEPT_HANDOFFS = 32
FRESH_S = 60.0  # so long times of handoffs are believed
AGEING_S = 15.0  # from one fit to the next, where they age and nothing is new
FORGETTING = 0.99  # of what is known, with each step
RIDGE = 0.002  # of a step's weight
SWEEPS = 40
STALL = 8.0  # times the longest plausible time: such a step compiled a kernel, or stood still
TRUSTED_STEPS = 8  # of a kind, before one can be a stall
CHANGED_STEPS = 16  # of a kind, all as slow as a stall: that is what steps take from now on
REFIT_S = 2.0
PRIOR_KV_BYTES = 131_072.0  # of a token
PRIOR = TimingModel(
    "prior",
    PRIOR_KV_BYTES,
    ChunkTiming(fixed_s=5e-3, per_token_s=4e-5),
    StepTiming(fixed_s=5e-3, per_sequence_s=1e-5),
    AttentionTiming(per_pair_s=1e-9, per_context_token_s=2e-8),
    TransferTiming(fixed_s=2.5e-3, per_byte_s=4e-6 / PRIOR_KV_BYTES),
)
MAX_DISTANCE = 4  # levels of topology between the workers of a READ; more count as this
# A byte's time grows by this with each level of distance, as long as no READ there was measured.
FARTHER = 2.0
PACE_STEP = 1.25  # from one pace to the next
PACE_SMOOTHING = 0.05  # share of the newest step
PACE_HYSTERESIS = 1.0  # of a pace's step: a worker between two paces keeps the one that it has
MAX_PACE = 8


@dataclass(frozen=True, slots=True)
class ReadSample:
    """The READs of one handoff, between workers that are `distance` levels of topology apart."""

    tokens: int
    read_bytes: int
    seconds: float
    distance: int = 0

    @property
    def byte_s(self) -> float:
        return self.seconds / self.read_bytes


_Timed = tuple[float, float]  # when a value was taken, and the value


class LiveTiming:
    """`model` is what is known now; another object after each change. `byte_s` are the seconds of a
    READ's byte at each distance, from 0 to MAX_DISTANCE; the model has those of most READs."""

    def __init__(self) -> None:
        self.model = PRIOR
        self.byte_s = _byte_s([], 0.0)
        self._scaled = PRIOR  # to the steps of each kind
        self._fitted = PRIOR  # without transfers
        # Ratios to the prior of the last steps with prompt tokens, and without.
        self._ratios: tuple[deque[float], deque[float]] = (
            deque(maxlen=KEPT_RATIOS),
            deque(maxlen=KEPT_RATIOS),
        )
        # The same steps' seconds for each prompt token, or for each sequence.
        self._unit_s: tuple[deque[float], deque[float]] = (
            deque(maxlen=KEPT_RATIOS),
            deque(maxlen=KEPT_RATIOS),
        )
        self._stalls = [0, 0]  # of each kind, since its last step that was none
        self._squares = [[0.0] * 6 for _ in range(6)]
        self._products = [0.0] * 6
        self._factors = [1.0] * 6  # of the scaled prior, as last fitted
        self._handoffs: deque[_Timed] = deque(maxlen=KEPT_HANDOFFS)
        self._reads: deque[tuple[float, ReadSample]] = deque(maxlen=KEPT_HANDOFFS)
        self._changed = False
        self._refit_s = -REFIT_S

    @property
    def measured(self) -> bool:
        """Return whether the model is fitted to steps, not to the prior alone."""
        return self.model.chunk is not PRIOR.chunk

    def add_step(self, work: StepWork, seconds: float) -> None:
        """Take a step of one of the workers. One without work or time says nothing, nor does one
        that stalled, unless all do; one that is larger than the last ones may take as many times
        longer."""
        units = work.prompt_tokens or work.sequences
        if seconds <= 0 or not units:
            return
        kind = not work.prompt_tokens
        ratios, unit_s = self._ratios[kind], self._unit_s[kind]
        scaled_s = self._scaled.step_s(work)
        if len(ratios) >= TRUSTED_STEPS and seconds > STALL * max(scaled_s, units * median(unit_s)):
            self._stalls[kind] += 1
            if self._stalls[kind] < CHANGED_STEPS:
                return
            self._forget_steps(kind)
        self._stalls[kind] = 0
        ratios.append(seconds / PRIOR.step_s(work))
        unit_s.append(seconds / units)
        self._changed = True
        if len(ratios) <= TRUSTED_STEPS:
            self._scaled = self._scaled_prior()
            weight = self._scaled.step_s(work)
        else:
            weight = max(self.model.step_s(work), scaled_s / STALL)
        row = [amount / weight for amount in _amounts(work, self.model)]
        share = seconds / weight
        for i, squares in enumerate(self._squares):
            own = row[i]
            self._products[i] = FORGETTING * self._products[i] + own * share
            for j in range(6):
                squares[j] = FORGETTING * squares[j] + own * row[j]

    def _forget_steps(self, kind: int) -> None:
        """Forget what steps of a kind took. The fit does not divide its sums by kind, so it forgets
        those of both; the last steps of the other kind still scale it."""
        self._ratios[kind].clear()
        self._unit_s[kind].clear()
        self._squares = [[0.0] * 6 for _ in range(6)]
        self._products = [0.0] * 6

    def add_handoff(self, seconds: float, now_s: float) -> None:
        """Take the time of a handoff beyond its prefill and its READs."""
        self._handoffs.append((now_s, seconds))
        self._changed = True

    def add_read(self, sample: ReadSample, now_s: float) -> None:
        """Take the READs of a handoff; those without bytes or tokens are ignored."""
        if sample.read_bytes > 0 and sample.tokens > 0:
            self._reads.append((now_s, sample))
            self._changed = True

    def refit(self, now_s: float) -> None:
        """Fit the model again, unless the last fit is recent, or nothing is new and no handoff
        ages."""
        if now_s < self._refit_s + (REFIT_S if self._changed else AGEING_S):
            return
        if not (self._changed or self._handoffs or self._reads):
            return
        if self._changed:
            self._fitted = self._fit()
        self._changed, self._refit_s = False, now_s
        self.model = self._with_transfers(self._fitted, now_s)
        self.byte_s = _byte_s(self._reads, now_s)

    def _fit(self) -> TimingModel:
        """Return the times of the steps, without transfers."""
        if not any(self._ratios):
            return PRIOR
        self._scaled = self._scaled_prior()
        start = _coefficients(self._scaled)
        _improve(self._factors, self._squares, self._products, start)
        return _model([a * b for a, b in zip(self._factors, start, strict=True)])

    def _scaled_prior(self) -> TimingModel:
        """Return the prior, each kind of step scaled to the measured ones; a kind without a
        measured step is scaled as the other kind."""
        known = [median(ratios) if ratios else None for ratios in self._ratios]
        chunk = known[0] or known[1] or 1.0
        step = known[1] or known[0] or 1.0
        chunk_s, step_s, token_s, pair_s, sequence_s, context_s = _coefficients(PRIOR)
        return _model(
            [
                chunk_s * chunk,
                step_s * step,
                token_s * chunk,
                pair_s * chunk,
                sequence_s * step,
                context_s * step,
            ]
        )

    def _with_transfers(self, model: TimingModel, now_s: float) -> TimingModel:
        """Return the model with the measured transfers, or the prior's if none was measured."""
        transfer, token_bytes = PRIOR.transfer, PRIOR_KV_BYTES
        if self._handoffs:
            fixed_s = _believed(self._handoffs, transfer.fixed_s, now_s)
            transfer = replace(transfer, fixed_s=fixed_s)
        if self._reads:
            byte_s = [(at_s, each.byte_s) for at_s, each in self._reads]
            per_byte_s = _believed(byte_s, transfer.per_byte_s, now_s)
            transfer = replace(transfer, per_byte_s=per_byte_s)
            token_bytes = median(each.read_bytes / each.tokens for _, each in self._reads)
        return replace(model, kv_bytes_per_token=token_bytes, transfer=transfer)


def _believed(taken: Sequence[_Timed], prior: float, now_s: float) -> float:
    """Return the median of the newest value and of those of the FRESH_S before it. One that is
    older than FRESH_S is drawn towards the prior, by half in each FRESH_S more."""
    newest_s, _ = taken[-1]
    middle = median(value for at_s, value in taken if at_s >= newest_s - FRESH_S)
    halvings = max(0.0, (now_s - newest_s) / FRESH_S - 1)
    return float(prior + (middle - prior) * 0.5**halvings)


def _byte_s(reads: Iterable[tuple[float, ReadSample]], now_s: float) -> tuple[float, ...]:
    """Return the seconds of a byte at each distance: those of its READs, and never less than
    nearer ones take. Without READs: FARTHER times those of the next nearer distance, or by as much
    less than those of the nearest that was measured."""
    taken: dict[int, list[_Timed]] = {}
    for at_s, each in reads:
        taken.setdefault(min(MAX_DISTANCE, each.distance), []).append((at_s, each.byte_s))
    usual_s = PRIOR.transfer.per_byte_s
    measured = {
        distance: _believed(values, usual_s * FARTHER**distance, now_s)
        for distance, values in taken.items()
    }
    nearest = min(measured, default=0)
    found = [measured.get(nearest, PRIOR.transfer.per_byte_s) / FARTHER**nearest]
    for distance in range(1, MAX_DISTANCE + 1):
        own = measured.get(distance, FARTHER * found[-1])
        found.append(max(found[-1], own))
    return tuple(found)


class Pace:
    """How long one worker's steps take beside the model of all, in steps of PACE_STEP: 0 as long, 3
    twice as long. A few values, so that workers that are alike stay so."""

    def __init__(self) -> None:
        self.value = 0
        self._log = 0.0

    def add(self, work: StepWork, seconds: float, model: TimingModel) -> None:
        """Take a step of this worker."""
        predicted_s = model.step_s(work)
        if seconds <= 0 or predicted_s <= 0:
            return
        log = math.log(seconds / predicted_s, PACE_STEP)
        self._log += PACE_SMOOTHING * (max(-MAX_PACE, min(MAX_PACE, log)) - self._log)
        if abs(self._log - self.value) > PACE_HYSTERESIS:
            self.value = round(self._log)

    @property
    def factor(self) -> float:
        return float(PACE_STEP**self.value)


def _amounts(work: StepWork, model: TimingModel) -> list[float]:
    """Return the amounts of a step by which a model's six coefficients are multiplied: see
    `_coefficients`. A step with both kinds of work has the larger fixed time."""
    both = work.prompt_tokens and work.sequences
    chunk = work.prompt_tokens > 0
    if both:
        chunk = model.chunk.fixed_s > model.step.fixed_s
    return [
        float(chunk),
        float(not chunk),
        float(work.prompt_tokens),
        float(work.pairs),
        float(work.sequences),
        float(work.context_tokens),
    ]


def _coefficients(model: TimingModel) -> list[float]:
    return [
        model.chunk.fixed_s,
        model.step.fixed_s,
        model.chunk.per_token_s,
        model.attention.per_pair_s,
        model.step.per_sequence_s,
        model.attention.per_context_token_s,
    ]


def _model(coefficients: Sequence[float]) -> TimingModel:
    chunk_s, step_s, token_s, pair_s, sequence_s, context_s = coefficients
    return TimingModel(
        "live",
        PRIOR_KV_BYTES,
        ChunkTiming(chunk_s, token_s),
        StepTiming(step_s, sequence_s),
        AttentionTiming(pair_s, context_s),
        PRIOR.transfer,
    )


def _improve(
    factors: list[float],
    squares: Sequence[Sequence[float]],
    products: Sequence[float],
    scale: Sequence[float],
) -> None:
    """Move the factors x >= 0 of `scale` towards the least x'Sx - 2p'x + RIDGE * |x - 1|^2, where S
    and p are `squares` and `products` in units of `scale`."""
    count = len(scale)
    form = [[squares[i][j] * scale[i] * scale[j] for j in range(count)] for i in range(count)]
    right = [products[i] * scale[i] + RIDGE for i in range(count)]
    for _ in range(SWEEPS):
        for i, row in enumerate(form):
            rest = sum(map(mul, row, factors)) - row[i] * factors[i]
            factors[i] = max(0.0, (right[i] - rest) / (row[i] + RIDGE))
