"""How many tokens to propose for each sequence of the next step: a pure decision.

    tokens a step     sum over sequences of 1 + a + a² + ... + aᵏ       a: accepted share
    ─────────────  =  ───────────────────────────────────────────────
    seconds           step(rows) + deepest k · draft(sequences)         rows: sequences + all k

For each deepest k, the tokens most likely to be accepted are added while their sum over the seconds
grows; the best of these is the optimum, because the gains of one sequence fall with k. The result
of the step before stays unless another is better by a margin, so that noise does not make lengths
swing. Lengths change no token of the output. Knows no clock and draws nothing at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from baton.engine.speculation.step_costs import Floats, StepCosts
from baton.engine.speculation.yield_gate import YieldGate

Ints = NDArray[np.int64]

LONGEST_DRAFT = 8
SWITCH_MARGIN = 0.02  # better than the lengths before by this, or they stay
PROBE_STEPS = 64  # without a proposal, before the first probe; doubled after one that fails
MAX_PROBE_STEPS = 1024
PROBED_SEQUENCES = 4  # of a step with a probe, one token each
_DECAY = 0.95  # of a sequence's evidence, for each verified step
_SHARED_DECAY = 0.99
_PRIOR_SHARE, _PRIOR_TRIALS = 0.6, 4.0


@dataclass(slots=True)
class Evidence:
    """Decaying counts of proposals that a target has judged: those up to the first difference."""

    accepted: float = 0.0
    judged: float = 0.0

    def add(self, proposed: int, accepted: int, decay: float) -> None:
        judged = accepted + (accepted < proposed)
        self.accepted = self.accepted * decay + accepted
        self.judged = self.judged * decay + judged

    def share(self, prior: float) -> float:
        """Return the accepted share, `prior` where nothing was judged."""
        return (self.accepted + _PRIOR_TRIALS * prior) / (self.judged + _PRIOR_TRIALS)


@dataclass(slots=True, eq=False)
class SequenceDraft:
    """The policy's record of one sequence. The caller keeps it and only passes it back."""

    evidence: Evidence = field(default_factory=Evidence)
    length: int | None = None  # of the step before


class DraftLengthPolicy:
    """Owned by one worker's decode loop. For each step with proposals, `record` each sequence; for
    each step without a prefill chunk, `observe_step`. `draft_costs` is one pass of a draft model by
    sequences; it stays empty for a proposer on the host. A choice costs O(n k log n) in numpy."""

    def __init__(self, longest: int = LONGEST_DRAFT) -> None:
        if longest < 0:
            raise ValueError(f"the longest draft is {longest} tokens")
        self._longest = longest
        self.step_costs = StepCosts()
        self.draft_costs = StepCosts()
        self._shared = Evidence()
        self._probes = _Probes()
        self._gate = YieldGate()

    def start(self) -> SequenceDraft:
        return SequenceDraft()

    def record(self, sequence: SequenceDraft, proposed: int, accepted: int) -> None:
        """Record that a target accepted `accepted` of `proposed` tokens."""
        if not 0 <= accepted <= proposed:
            raise ValueError(f"{accepted} of {proposed} proposals were accepted")
        if proposed:
            sequence.evidence.add(proposed, accepted, _DECAY)
            self._shared.add(proposed, accepted, _SHARED_DECAY)

    def observe_step(self, rows: int, seconds: float) -> None:
        """Record what a step of decode rows took, with what the host adds to it; not one with a
        prefill chunk."""
        self.step_costs.observe(rows, seconds)

    def observe_draft(self, sequences: int, passes: int, seconds: float) -> None:
        """Record what `passes` passes of a draft model over so many sequences took."""
        self.draft_costs.observe(sequences, seconds / passes)

    def observe_yield(self, sequences: int, tokens: int, seconds: float, *, looked: bool) -> bool:
        """Record how many tokens a step without a prefill chunk yielded, planned with or without a
        search for proposals, and all the time that it took: while the yield of speculation is
        lower, none is looked for. Return whether that begins now."""
        return self._gate.observe(sequences, tokens, seconds, looked=looked)

    def may_propose(self, sequences: int) -> bool:
        """Return whether a step of so many sequences may have proposals at all: not before a step
        was observed, nor while speculation yields less than plain steps of such a batch did. Costs
        a constant."""
        return bool(self.step_costs) and self._gate.open(sequences)

    def acceptance(self, sequence: SequenceDraft) -> float:
        """Return the estimated share of proposals that the target accepts, one by one."""
        return sequence.evidence.share(self._shared.share(_PRIOR_SHARE))

    def choose(self, sequences: Sequence[SequenceDraft], limits: Sequence[int]) -> list[int]:
        """Return how many tokens to propose for each sequence of the next step: at most its limit,
        which is what its end and its blocks leave room for. 0 for all unless it `may_propose`."""
        if not sequences or not self.may_propose(len(sequences)):
            return [0] * len(sequences)
        caps = np.clip(np.asarray(limits, dtype=np.int64), 0, self._longest)
        shares = np.array([self.acceptance(sequence) for sequence in sequences])
        before = [sequence.length for sequence in sequences]
        lengths = self._kept(shares, caps, before, self._optimum(shares, caps)).tolist()
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.length = length
        return self._probes.add(sequences, lengths, caps.tolist())

    def tokens_per_second(self, shares: Sequence[float], lengths: Sequence[int]) -> float:
        """Return the expected yield of a step with these accepted shares and draft lengths."""
        return self._rate(np.asarray(shares), np.asarray(lengths, dtype=np.int64))

    def _rate(self, shares: Floats, lengths: Ints) -> float:
        positions = np.arange(self._longest)
        gains = shares[:, None] ** (positions + 1)
        tokens = len(shares) + float(gains[positions < lengths[:, None]].sum())
        step_s = float(self.step_costs.seconds(len(shares) + int(lengths.sum())))
        deepest = int(lengths.max(initial=0))
        return tokens / (step_s + deepest * float(self.draft_costs.seconds(len(shares))))

    def _optimum(self, shares: Floats, caps: Ints) -> Ints:
        """Return the lengths that yield most, for each deepest length the best of all sums."""
        sequences, positions = len(shares), np.arange(self._longest)
        gains = np.where(positions < caps[:, None], shares[:, None] ** (positions + 1), 0.0)
        pass_s = float(self.draft_costs.seconds(sequences))
        best, best_rate = np.zeros(sequences, dtype=np.int64), self._rate(shares, caps * 0)
        deepest_cap = int(caps.max(initial=0))
        # where depth costs nothing, the deepest covers the others
        for deepest in range(1 if pass_s else max(deepest_cap, 1), deepest_cap + 1):
            flat = gains[:, :deepest].ravel()
            # stable: where gains are equal, a sequence's earlier positions come first
            order = np.argsort(-flat, kind="stable")[: int(np.minimum(caps, deepest).sum())]
            tokens = sequences + np.cumsum(flat[order])
            rows = sequences + np.arange(1, len(order) + 1)
            rates = tokens / (self.step_costs.seconds(rows) + deepest * pass_s)
            count = int(np.argmax(rates))
            if rates[count] > best_rate:
                best_rate = float(rates[count])
                best = np.bincount(order[: count + 1] // deepest, minlength=sequences)
        return best

    def _kept(self, shares: Floats, caps: Ints, before: Sequence[int | None], best: Ints) -> Ints:
        """Return the lengths of the step before, if `best` is not better by the margin."""
        chosen = [int(b) if old is None else old for old, b in zip(before, best, strict=True)]
        kept = np.minimum(np.array(chosen, dtype=np.int64), caps)
        rate, kept_rate = self._rate(shares, best), self._rate(shares, kept)
        return best if rate > (1 + SWITCH_MARGIN) * kept_rate else kept


class _Probes:
    """One proposal now and then for sequences that would get none, so that a policy notices when
    speculation pays again. A probe that changes nothing makes the next one twice as late."""

    def __init__(self) -> None:
        self._steps = 0  # since the last probe, of those in which some sequence got none
        self._interval = PROBE_STEPS
        self._probed: list[SequenceDraft] = []  # by the last probe, until it is judged

    def add(
        self, sequences: Sequence[SequenceDraft], lengths: list[int], caps: list[int]
    ) -> list[int]:
        """Return `lengths` with the probes that are due."""
        silent = [i for i, cap in enumerate(caps) if cap and not lengths[i]]
        if self._probed:
            helped = any(sequence.length for sequence in self._probed)
            doubled = min(2 * self._interval, MAX_PROBE_STEPS)
            self._interval = PROBE_STEPS if helped else doubled
            self._probed = []
        self._steps += bool(silent)
        if self._steps < self._interval:
            return lengths
        self._steps = 0
        least_judged = sorted(silent, key=lambda i: sequences[i].evidence.judged)
        for i in least_judged[:PROBED_SEQUENCES]:
            lengths[i] = 1
            self._probed.append(sequences[i])
        return lengths
