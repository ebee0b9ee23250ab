"""Deliberate breaks of constrained decoding: what a matcher has read when a mask is computed.

A part of mutations.py, which says what they are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.runtime.grammar.choice_masks import ChoiceMasks, TokenMask
from baton.runtime.grammar.matcher import GrammarMatcher
from baton.simulation.mutations.patches import Break, always


def _begun_behind_the_accepted(before: Any) -> Any:
    def begin(self: ChoiceMasks, grammar: Any, output: Sequence[int], *more: Any) -> None:
        before(self, grammar, output, *more)
        self._begin = len(output)

    return begin


OF_GRAMMARS: dict[str, Break] = {
    "matcher-not-rebuilt": Break(
        "after a migration the matcher has not read the accepted tokens",
        ChoiceMasks,
        "__init__",
        _begun_behind_the_accepted,
    ),
    "rejected-proposals-in-the-matcher": Break(
        "rejected proposals stay in the matcher", GrammarMatcher, "rollback", always(None)
    ),
    "mask-of-the-first-row": Break(
        "the mask behind proposals is that of the first row",
        TokenMask,
        "extended",
        lambda before: lambda self, tokens: self,
    ),
}
