"""The progress of the KV of a draft model or an EAGLE-3 head in one sequence.

    tokens   ├── draft KV ──┤ missing ├ known │ proposed ...
             0           computed           start

A step with draft work computes the missing tokens, the known one, and all proposals but the last.
What a head computes of a proposal does not stay: it lacks the target's hidden states, so an
accepted proposal is computed again.
Steps without proposals leave the draft model behind. It catches up in the next step that proposes,
or once a block's worth is missing, so that blocks can be published: a published block holds the
KV of both models. Pure; the speculator plans with it and the scheduler commits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from baton.engine.scheduling.batch import DraftWork, Slice

Drafting = Literal["none", "draft", "eagle3"]  # what proposes within the engine's steps

CATCH_UP_TOKENS = 16  # that are missing before a step without proposals computes them


@dataclass(slots=True)
class DraftProgress:
    """Tokens whose draft KV is in the blocks: now, and after the steps under way."""

    computed: int
    planned: int
    keeps_proposals: bool = True  # their KV stays where they are accepted: not that of a head

    @staticmethod
    def at(tokens: int, *, keeps_proposals: bool = True) -> DraftProgress:
        """Return the progress of a sequence whose tokens both models have computed."""
        return DraftProgress(tokens, tokens, keeps_proposals)

    def is_behind(self, start: int) -> bool:
        """Return whether a step of the token at `start` should compute what is missing."""
        return start + 1 - self.planned > CATCH_UP_TOKENS

    def plan(self, start: int, proposals: int, span: Callable[[int, int], list[int]]) -> DraftWork:
        """Return the draft work of a step of the token at `start`; `span` gives known tokens."""
        work = DraftWork(span(self.planned, start), proposals)
        self.planned = start + self._kept(proposals)
        return work

    def commit(self, item: Slice, computed: int, *, ran: bool = True) -> None:
        """Take a step's slice, after which the target has the KV of `computed` tokens. `ran`:
        whether the step had memory for its draft work too."""
        if item.draft is None:
            return
        if ran:
            self.computed = min(computed, item.start + self._kept(item.draft.tokens))
        if item.draft.tokens:  # no other step is under way
            self.planned = self.computed

    def _kept(self, proposals: int) -> int:
        """Return how many tokens from the known one on have KV that stays, at most."""
        return max(1, proposals) if self.keeps_proposals else 1
