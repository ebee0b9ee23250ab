"""The vocabulary of a lab's grammars, and each grammar's own word on a text.

    tokens 0 to 255    the bytes        256    the end        257 and up    words of several letters

Workers mask by the product's matchers and masks. What is expected of them comes from here: a fresh
matcher for each text, which has read that text from its first token on, rolls nothing back and
knows no proposals. Keeps compiled grammars, for all runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from baton.runtime.grammar.matcher import CompiledGrammar, GrammarMatcher, compile_grammar
from baton.runtime.grammar.vocabulary import Vocabulary, build_vocabulary

END = 256


@lru_cache(maxsize=4)
def lab_vocabulary(size: int) -> Vocabulary:
    """Return a vocabulary of `size` tokens."""
    words = [f"ab{number}".encode() for number in range(size - END - 1)]
    return build_vocabulary([*(bytes([byte]) for byte in range(END)), b"<end>", *words], [END])


@lru_cache(maxsize=64)
def compiled(grammar: str, size: int) -> CompiledGrammar:
    return compile_grammar(grammar, lab_vocabulary(size))


def matcher_behind(grammar: str, size: int, tokens: Sequence[int]) -> GrammarMatcher | None:
    """Return a matcher that has read the tokens; None if the grammar does not admit them."""
    matcher = compiled(grammar, size).matcher()
    return matcher if matcher.consume(tokens) == len(tokens) else None


class FollowedMask:
    """Implements the engine's `AllowedTokens` at the end of one text."""

    def __init__(self, grammar: str, size: int, tokens: Sequence[int]) -> None:
        self._grammar, self._size, self._tokens = grammar, size, tuple(tokens)

    def bitmask(self) -> bytes | None:
        matcher = matcher_behind(self._grammar, self._size, self._tokens)
        return None if matcher is None else matcher.bitmask()

    def extended(self, tokens: Sequence[int]) -> FollowedMask:
        return FollowedMask(self._grammar, self._size, (*self._tokens, *tokens))
