"""The masks of one choice: which tokens its grammar admits after each of its tokens.

    output      a  b  c │ d     accepted tokens, then those that are drawn or proposed
    mask at 3            └─▶ bits for the token after c
    extended((d,))          └─▶ bits for the token after d; computed from now on

A mask is computed in a mask thread as soon as the tokens before it are known, while the step's
forward pass runs, and awaited only before the draw. The matcher follows whichever state is wanted:
it rolls back to the last common token and consumes the rest, so rejected proposals, a preemption
and a migration (all accepted tokens are consumed at once) need nothing of their own. A matcher that
broke a limit stays in its error, so another one takes over: the error counts only if the output
comes to the tokens behind which it arose. Reasoning that comes before the answer is not masked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from baton.runtime import metrics
from baton.runtime.grammar.matcher import CompiledGrammar, GrammarMatcher

MAX_OWN_MATCHERS = 4  # of a choice, after errors: each is compiled, and reads the whole answer


class MaskThreads(Protocol):
    """Computes masks: a pool of threads, or at once where there are none."""

    def submit(self, work: Callable[[], bytes | None], /) -> Future[bytes | None]: ...


class InlineMasks:
    """Computes each mask where it is asked for: in simulations, which have no threads."""

    def submit(self, work: Callable[[], bytes | None], /) -> Future[bytes | None]:
        done: Future[bytes | None] = Future()
        done.set_result(work())
        return done


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The tokens around reasoning. `opened`: the prompt has opened it, so the output begins inside;
    else the output may begin with `opening`, or with the answer."""

    opening: int
    closing: int
    opened: bool


@dataclass(frozen=True, slots=True)
class _Failure:
    """A mask that the matcher could not make: that after `length` accepted tokens and `tail`."""

    length: int
    tail: tuple[int, ...]
    reason: str


class ChoiceMasks:
    """`output` grows by accepted tokens only; it is shared with the owner of the choice."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        output: Sequence[int],
        threads: MaskThreads,
        reasoning: Reasoning | None = None,
    ) -> None:
        self._grammar = grammar
        self._lexer_number = grammar.lexer_number
        self._matcher = grammar.matcher()
        self._own_matchers = 0  # so far; before the first, the matcher shares its lexer
        self._output = output
        self._threads = threads
        self._reasoning = reasoning
        self._lock = threading.Lock()
        self._begin: int | None = None if reasoning else 0  # of the answer in the output
        self._searched = 0  # leading tokens of the output without the end of reasoning
        self._consumed: list[int] = []  # tokens of the answer that the matcher has
        self._checked = 0  # of these, tokens that are accepted
        self._failure: _Failure | None = None  # the last; behind its tokens there is no mask

    @property
    def error(self) -> str | None:
        """Why the token after the output has no mask: the matcher broke a limit behind its tokens,
        or behind the first of them. None where there was no error, or behind other tokens."""
        failure = self._failure
        if failure is None or not self._follows(failure, len(self._output), ()):
            return None
        return failure.reason

    def mask(self, *, start: bool) -> TokenMask:
        """Return the mask after all accepted tokens; begin to compute it if `start`, else it lacks
        a token that a step draws now."""
        made = TokenMask(self, len(self._output), ())
        if start:
            made.compute()
        return made

    def request(self, length: int, tail: tuple[int, ...]) -> Future[bytes | None]:
        return self._threads.submit(lambda: self._measured(length, tail))

    def _measured(self, length: int, tail: tuple[int, ...]) -> bytes | None:
        started_s = time.perf_counter()
        bits = self.bits(length, tail)
        metrics.MASK_SECONDS.inc(time.perf_counter() - started_s)
        metrics.MASKS.inc()
        return bits

    def bits(self, length: int, tail: tuple[int, ...]) -> bytes | None:
        """Return the mask after `length` accepted tokens and `tail`; None inside of reasoning,
        behind an end token, where the tail is no output of the grammar, and behind an error."""
        with self._lock:
            begin, failure = self._answer_begin(length, tail), self._failure
            if begin is None or failure is not None and self._follows(failure, length, tail):
                return None
            bits = self._computed(begin, length, tail)
            if (reason := self._matcher.error) is not None:
                self._failure = _Failure(length, tail, reason)
                return None
        if bits is not None and self._reasoning is not None and not length and not tail:
            return _with(bits, self._reasoning.opening)
        return bits

    def _follows(self, failure: _Failure, length: int, tail: tuple[int, ...]) -> bool:
        """Return whether `length` accepted tokens and `tail` begin with the tokens of a failure."""
        first = min(length, failure.length)  # before it both are the same output
        wrong = [*self._output[first : failure.length], *failure.tail]
        return [*self._output[first:length], *tail][: len(wrong)] == wrong

    def _computed(self, begin: int, length: int, tail: tuple[int, ...]) -> bytes | None:
        """Compute a mask; None too if the matcher is in an error then. One that was in an error
        before, or meets it with the lexer that others share, is replaced by one of its own."""
        if not self._own_matchers:
            with self._grammar.lock:
                if self._lexer_number != self._grammar.lexer_number:
                    self._lexer_number = self._grammar.lexer_number
                    self._replace(self._grammar.matcher())
                bits = self._bitmask(begin, length, tail)
                if self._matcher.error is None:
                    return bits
                self._grammar.renew()
        if self._own_matchers < MAX_OWN_MATCHERS and self._matcher.error is not None:
            self._own_matchers += 1
            self._replace(self._grammar.own_matcher())
        return self._bitmask(begin, length, tail)

    def _replace(self, matcher: GrammarMatcher) -> None:
        self._matcher, self._consumed, self._checked = matcher, [], 0

    def _bitmask(self, begin: int, length: int, tail: tuple[int, ...]) -> bytes | None:
        return self._matcher.bitmask() if self._go_to(begin, length, tail) else None

    def _go_to(self, begin: int, length: int, tail: tuple[int, ...]) -> bool:
        """Bring the matcher to this state. Return whether the grammar admits the tokens."""
        sure = min(self._checked, length - begin)
        wanted = [*self._output[begin + sure : length], *tail]
        if begin > length:  # the answer begins within the tail
            wanted, sure = list(tail[begin - length :]), 0
        have = self._consumed[sure:]
        same = 0
        while same < min(len(have), len(wanted)) and have[same] == wanted[same]:
            same += 1
        self._matcher.rollback(len(have) - same)
        del self._consumed[sure + same :]
        taken = self._matcher.consume(wanted[same:])
        self._consumed += wanted[same : same + taken]
        self._checked = max(0, min(len(self._consumed), length - begin))
        return same + taken == len(wanted)

    def _answer_begin(self, length: int, tail: tuple[int, ...]) -> int | None:
        """Return the index of the answer's first token; None inside the reasoning."""
        if self._begin is not None or self._reasoning is None:
            return self._begin
        total = length + len(tail)
        if not self._reasoning.opened and total:
            first = self._output[0] if length else tail[0]
            if first != self._reasoning.opening:
                if length:
                    self._begin = 0
                return 0
        elif not self._reasoning.opened:
            return 0
        for index in range(self._searched, total):
            token = self._output[index] if index < length else tail[index - length]
            if token == self._reasoning.closing:
                if index < length:
                    self._begin = index + 1
                return index + 1
        self._searched = length
        return None


class TokenMask:
    """The mask of one draw: the `AllowedTokens` of the engine."""

    __slots__ = ("_bits", "_length", "_owner", "_tail")

    def __init__(self, owner: ChoiceMasks, length: int, tail: tuple[int, ...]) -> None:
        self._owner = owner
        self._length = length
        self._tail = tail
        self._bits: Future[bytes | None] | None = None

    def compute(self) -> None:
        """Begin to compute the mask."""
        if self._bits is None:
            self._bits = self._owner.request(self._length, self._tail)

    def extended(self, tokens: Sequence[int]) -> TokenMask:
        """Return the mask after these tokens too, and begin to compute it."""
        made = TokenMask(self._owner, self._length, (*self._tail, *tokens))
        made.compute()
        return made

    def bitmask(self) -> bytes | None:
        """Wait for the mask: one bit for each token id, lowest first; None: all are admitted."""
        self.compute()
        assert self._bits is not None
        if self._bits.done():
            return self._bits.result()
        started_s = time.perf_counter()
        bits = self._bits.result()  # bounded by the matcher's limits
        metrics.MASK_WAIT_SECONDS.inc(time.perf_counter() - started_s)
        return bits


def _with(bits: bytes, token: int) -> bytes:
    """Return the mask that admits `token` too."""
    made = bytearray(bits)
    if token // 8 < len(made):
        made[token // 8] |= 1 << token % 8
    return bytes(made)
