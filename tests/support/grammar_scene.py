"""A small vocabulary and what grammars make of it, for tests that need no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from llguidance import LLMatcher, LLParserLimits

from baton.runtime.grammar import matcher
from baton.runtime.grammar.choice_masks import ChoiceMasks, InlineMasks
from baton.runtime.grammar.grammar_text import choice_grammar, regex_grammar
from baton.runtime.grammar.matcher import CompiledGrammar, GrammarMatcher, compile_grammar
from baton.runtime.grammar.vocabulary import Vocabulary, build_vocabulary

PIECES = [b'{"', b'":', b'","', b'"}', b"ab", b"abc", b"true", b"null", b"12", b"\xc3\xa9", b"yes"]
TOKENS = [*(bytes([byte]) for byte in range(256)), *PIECES, b"<end>", b"<think>", b"</think>"]
END = TOKENS.index(b"<end>")
OPENING = TOKENS.index(b"<think>")
CLOSING = TOKENS.index(b"</think>")


class RustPanic(BaseException):
    """Stands for the panic of a Rust library, which is no Exception either."""


def small_vocabulary() -> Vocabulary:
    return build_vocabulary(TOKENS, [END], [OPENING, CLOSING])


class _BrokenMatcher(GrammarMatcher):
    """A matcher that breaks a limit at its first mask."""

    def __init__(self, matcher: LLMatcher, reason: str) -> None:
        super().__init__(matcher)
        self._reason: str | None = None
        self._next = reason

    @property
    def error(self) -> str | None:
        return self._reason

    def bitmask(self) -> bytes | None:
        self._reason = self._next
        return None


@dataclass(slots=True, eq=False)
class _BrokenGrammar(CompiledGrammar):
    reason: str = ""

    def matcher(self) -> GrammarMatcher:
        return _BrokenMatcher(self.start.deep_copy(), self.reason)

    own_matcher = matcher


def failed_masks(reason: str) -> ChoiceMasks:
    """Return masks whose matcher broke a limit with this reason, before the first token."""
    made = compile_grammar(choice_grammar(["yes"]), small_vocabulary())
    broken = _BrokenGrammar(made.text, made.start, made.vocabulary, reason=reason)
    masks = ChoiceMasks(broken, [], InlineMasks())
    masks.mask(start=True)
    return masks


def costly_grammar(monkeypatch: pytest.MonkeyPatch) -> CompiledGrammar:
    """Return a grammar of "ok1", whose matchers break a limit behind each of "p" to "z"."""
    monkeypatch.setattr(matcher, "LIMITS", LLParserLimits(step_lexer_fuel=50))
    return compile_grammar(regex_grammar("ok1|[p-z](a|b)*a(a|b){12}c"), small_vocabulary())


def admitted(bits: bytes | None) -> set[int]:
    """Return the token ids of a mask; all of them without one."""
    if bits is None:
        return set(range(len(TOKENS)))
    return {token for token in range(len(TOKENS)) if bits[token // 8] >> token % 8 & 1}


def text_of(tokens: list[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token != END).decode()


def tokens_of(text: str) -> list[int]:
    return list(text.encode())
