"""A small vocabulary and what grammars make of it, for tests that need no tokenizer."""

from __future__ import annotations

from baton.runtime.grammar.choice_masks import ChoiceMasks, InlineMasks
from baton.runtime.grammar.grammar_text import choice_grammar
from baton.runtime.grammar.matcher import compile_grammar
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


def failed_masks(reason: str) -> ChoiceMasks:
    """Return masks whose matcher broke a limit with this reason."""
    masks = ChoiceMasks(
        compile_grammar(choice_grammar(["yes"]), small_vocabulary()), [], InlineMasks()
    )
    masks.error = reason
    return masks


def admitted(bits: bytes | None) -> set[int]:
    """Return the token ids of a mask; all of them without one."""
    if bits is None:
        return set(range(len(TOKENS)))
    return {token for token in range(len(TOKENS)) if bits[token // 8] >> token % 8 & 1}


def text_of(tokens: list[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token != END).decode()


def tokens_of(text: str) -> list[int]:
    return list(text.encode())
