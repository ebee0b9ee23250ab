"""Speculators whose drafts have a fixed length, whether that pays or not: for benchmarks in which
two runs must propose at the same positions. Owned by a worker, as any speculator is.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.decode_worker.draft_progress import Drafting
from baton.decode_worker.speculator import Speculator
from baton.engine.speculation.draft_length import DraftLengthPolicy, SequenceDraft
from baton.engine.speculation.proposer import Proposer


class FixedLengths(DraftLengthPolicy):
    """Proposes as much as there is room for, whether it pays or not."""

    def may_propose(self, sequences: int) -> bool:
        return True

    def choose(self, sequences: Sequence[SequenceDraft], limits: Sequence[int]) -> list[int]:
        return [min(limit, self._longest) for limit in limits]


class FixedSpeculator(Speculator):
    """Speculates with `longest` tokens in each step; with none, it only measures steps."""

    def __init__(self, proposer: Proposer, longest: int) -> None:
        super().__init__(proposer, max(longest, 1))
        self.policy = self._policy = FixedLengths(longest)


class FixedDraft(Speculator):
    """A draft model or head of a fixed length, so that two runs propose at the same positions."""

    def __init__(self, longest: int, drafting: Drafting = "draft") -> None:
        super().__init__(None, longest, drafting)
        self._policy = FixedLengths(longest)
