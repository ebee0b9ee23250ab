"""Whether speculation has paid so far: tokens a second of steps that looked for proposals, whether
they found any or not, and of those that did not look.

    sequences in the batch    1   2..3   4..7   8..15   ..       one record for each
    plain        tokens / seconds, decaying
    speculating  tokens / seconds, decaying     lower than plain ─▶ closed for a while, then tried

The draft lengths come from a model of costs and chances, which noise can fool: it takes the best of
many estimates, so that errors add up to its side. These two rates are measured, whatever they are
made of: a search that finds nothing costs time too. Knows no lengths and no clock; draws nothing at
random.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRIAL_STEPS = 8  # that look for proposals, before they are judged
PLAIN_STEPS = 4  # that do not, to compare them with
CLOSED_STEPS = 64  # that do not, before the next trial; doubled after one that fails
MAX_CLOSED_STEPS = 2048
REFRESH_STEPS = 128  # that look, after which one does not
_DECAY = 0.95  # of a rate's evidence, for each of its steps


@dataclass(slots=True)
class _Rate:
    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens = self.tokens * _DECAY + tokens
        self.seconds = self.seconds * _DECAY + seconds
        self.steps += 1

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Record:
    """The rates of batches of similar sizes."""

    plain: _Rate = field(default_factory=_Rate)
    speculating: _Rate = field(default_factory=_Rate)
    waits: int = 0  # plain steps until the next trial
    closed_steps: int = CLOSED_STEPS
    since_refresh: int = 0

    def add_plain(self, tokens: int, seconds: float) -> bool:
        self.plain.add(tokens, seconds)
        self.since_refresh = 0
        self.waits = max(0, self.waits - 1)
        return self._judge()

    def add_speculating(self, tokens: int, seconds: float) -> bool:
        self.speculating.add(tokens, seconds)
        self.since_refresh += 1
        return self._judge()

    def _judge(self) -> bool:
        """Return whether speculation stops now."""
        steps = self.speculating.steps
        if steps < TRIAL_STEPS or self.waits:
            return False
        if self.plain.steps < PLAIN_STEPS:
            self.waits = PLAIN_STEPS - self.plain.steps
        elif self.speculating.tokens_per_s < self.plain.tokens_per_s:
            self.waits, self.speculating = self.closed_steps, _Rate()
            self.closed_steps = min(2 * self.closed_steps, MAX_CLOSED_STEPS)
            return True
        elif steps >= CLOSED_STEPS:
            self.closed_steps = CLOSED_STEPS
        return False


class YieldGate:
    """Owned by one worker's decode loop: `observe` each step that decodes alone."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def open(self, sequences: int) -> bool:
        """Return whether the next step, of so many sequences, may look for proposals."""
        record = self._record(sequences)
        return not record.waits and record.since_refresh < REFRESH_STEPS

    def observe(self, sequences: int, tokens: int, seconds: float, *, looked: bool) -> bool:
        """Record what a step of so many sequences yielded, and the time that it took. `looked`: it
        was planned with a search for proposals. Return whether batches of this size now stop to
        speculate."""
        record = self._record(sequences)
        add = record.add_speculating if looked else record.add_plain
        return add(tokens, seconds)

    def _record(self, sequences: int) -> _Record:
        return self._records.setdefault(sequences.bit_length(), _Record())
