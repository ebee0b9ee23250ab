"""A grammar compiled for a vocabulary, and how far one output has come in it.

    CompiledGrammar ── matcher() ──▶ GrammarMatcher: consume, rollback, bitmask

llguidance never raises: an error is a state that a matcher does not leave, nor do those that share
its lexer. This module asks for it after each call. Compiling and masks are bounded by `LIMITS`; a
matcher is used by one thread at a time. Knows no request.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from llguidance import LLMatcher, LLParserLimits

from baton.runtime.errors import InvalidRequest
from baton.runtime.grammar.vocabulary import Vocabulary

# Fuel of the lexer is spent at some 50,000 units a millisecond, a state takes 1 to 2 KB.
LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=400_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
MAX_GRAMMAR_BYTES = 256 << 10  # of one request's grammar, as it travels
MAX_REASON_CHARS = 300
_ECHO = re.compile(r"\^|\d+ \|")  # the line of a grammar, and a mark beneath it
# Either with or without the place of the pattern in a grammar, which a client may not have written.
_PATTERN_ERROR = re.compile(
    r'(?:invalid regex ".*" \(in regex\): )?regex parse error:\n {4}(.*)\n {4}( *)\^+\nerror: (.*)'
)
_UNHELPFUL = re.compile(r"\s*<non-verbose/>\s*")


class GrammarMatcher:
    """The position of one output in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str | None:
        """Why the matcher cannot go on; None while it can."""
        return shortened(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def complete(self) -> bool:
        """Whether the output may end here."""
        return self._matcher.is_accepting()

    @property
    def exhausted(self) -> bool:
        """Whether nothing but an end token may follow."""
        return self._matcher.is_stopped()

    def admitted(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens, from the first on, the grammar admits here."""
        return self._matcher.validate_tokens(list(tokens))

    def consume(self, tokens: Sequence[int]) -> int:
        """Go on by the tokens that the grammar admits, up to the first that it does not. Return
        how many were consumed."""
        return self._matcher.try_consume_tokens(list(tokens))

    def rollback(self, tokens: int) -> None:
        """Take back the last `tokens` that were consumed."""
        if tokens:
            self._matcher.rollback(tokens)

    def bitmask(self) -> bytes | None:
        """Return one bit for each token id, lowest first, set where the grammar admits the token;
        None in an error."""
        if self._matcher.is_error():
            return None
        bits = self._matcher.compute_bitmask()
        return None if self._matcher.is_error() else bits


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """Shared by all outputs that follow the same grammar. Their matchers share a lexer: `lock` is
    held while one is used, so that no other meets its error, and after an error all use the next
    lexer."""

    text: str
    start: LLMatcher
    vocabulary: Vocabulary
    lock: threading.Lock = field(default_factory=threading.Lock)
    lexer_number: int = 0

    def matcher(self) -> GrammarMatcher:
        """Return a matcher that shares the lexer."""
        return GrammarMatcher(self.start.deep_copy())

    def own_matcher(self) -> GrammarMatcher:
        """Compile the grammar again, and return a matcher with a lexer of its own."""
        return GrammarMatcher(_compiled(self.text, self.vocabulary))

    def renew(self) -> None:
        """Compile the grammar again, for matchers with the next lexer."""
        self.start = _compiled(self.text, self.vocabulary)
        self.lexer_number += 1


def compile_grammar(text: str, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compile a grammar in llguidance's form, which `grammar_text` writes. Raises InvalidRequest,
    with the position if llguidance names one, for a grammar that is invalid, over the limits, or
    admits nothing."""
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"the grammar has {len(text)} characters, at most {MAX_GRAMMAR_BYTES} are taken: "
            "make it smaller"
        )
    matcher = _compiled(text, vocabulary)
    compiled = CompiledGrammar(text, matcher, vocabulary)
    first = compiled.matcher()
    bits = first.bitmask()
    if matcher.is_error() or bits is None:
        raise InvalidRequest(shortened(matcher.get_error()) or str(first.error))
    if not any(bits):
        raise InvalidRequest("the grammar admits no output: relax it")
    return compiled


def _compiled(text: str, vocabulary: Vocabulary) -> LLMatcher:
    return LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=LIMITS)


def shortened(reason: str) -> str:
    """Return an error of llguidance on one line, of bounded length. One of a pattern of one line
    names the character."""
    reason = _PATTERN_ERROR.sub(_pattern_error, reason)
    lines = (line.strip() for line in _UNHELPFUL.sub(" ", reason).split("\n"))
    kept = [line for line in lines if line and not _ECHO.match(line)]
    return " ".join(kept)[:MAX_REASON_CHARS]


def _pattern_error(found: re.Match[str]) -> str:
    pattern, before, reason = found.groups()
    return f"invalid regex {pattern[:100]!r} at character {len(before) + 1}: {reason}"


def over_limits(reason: str) -> str:
    """Return the words for an output whose matcher broke a limit; its reason may be empty."""
    known = f" ({reason})" if reason else ""
    return f"the grammar took too many states for its next token{known}: make it simpler"
