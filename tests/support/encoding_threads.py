"""Holds up the threads that encode prompts.

`HfTokenizer` calls `_encode` in its own threads, which no caller sees; a test that must know that a
thread has begun, or keep it from ending, changes that function here, and only here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.router.text.tokenizer import HfTokenizer


def before_encoding(tokenizer: HfTokenizer, act: Callable[[str], None]) -> None:
    """Call `act` with each text, in the thread of `tokenizer` that is about to encode it."""
    encode = tokenizer._encode

    def acting(text: str, add_special_tokens: bool) -> list[int]:
        act(text)
        return encode(text, add_special_tokens)

    tokenizer._encode = acting  # type: ignore[method-assign] # wraps one instance


def before_all_encoding(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    """Same as `before_encoding`, for every tokenizer, also those to come."""
    encode = HfTokenizer._encode

    def acting(own: HfTokenizer, text: str, add_special_tokens: bool) -> list[int]:
        act(text)
        return encode(own, text, add_special_tokens)

    monkeypatch.setattr(HfTokenizer, "_encode", acting)
