"""The progress of a draft model's KV in one sequence.

    tokens   ├── draft KV ──┤ missing ├ known │ proposed ...
             0           computed           start

A step with draft work computes the missing tokens, the known one, and all proposals but the last.
Steps without proposals leave the draft model behind. It catches up in the next step that proposes,
or once a block's worth is missing, so that blocks can be published: a published block holds the
KV of both models. Pure; the speculator plans with it and the scheduler commits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.scheduling.batch import DraftWork, Slice

CATCH_UP_TOKENS = 16  # that are missing before a step without proposals computes them


@dataclass(slots=True)
class DraftProgress:
    """Tokens whose draft KV is in the blocks: now, and after the steps under way."""

    computed: int
    planned: int

    @staticmethod
    def at(tokens: int) -> DraftProgress:
        """Return the progress of a sequence whose tokens both models have computed."""
        return DraftProgress(tokens, tokens)

    def is_behind(self, start: int) -> bool:
        """Return whether a step of the token at `start` should compute what is missing."""
        return start + 1 - self.planned > CATCH_UP_TOKENS

    def plan(self, start: int, proposals: int, span: Callable[[int, int], list[int]]) -> DraftWork:
        """Return the draft work of a step of the token at `start`; `span` gives known tokens."""
        work = DraftWork(span(self.planned, start), proposals)
        self.planned = start + max(1, proposals)
        return work

    def commit(self, item: Slice, computed: int, *, ran: bool = True) -> None:
        """Take a step's slice, after which the target has the KV of `computed` tokens. `ran`:
        whether the step had memory for its draft work too."""
        if item.draft is None:
            return
        if ran:
            self.computed = min(computed, item.start + max(1, item.draft.tokens))
        if item.draft.tokens:  # no other step is under way
            self.planned = self.computed
