"""Holds up the threads that encode prompts.

`HfTokenizer` calls `_encode` in its own threads, which no caller sees; a test that must know that a
thread has begun, or keep it from ending, changes that function here, and only here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from baton.router.text.tokenizer import HfTokenizer, Text
from tests.support.machine_speed import slowness


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


class EncodingThreads:
    """The threads of every tokenizer: they wait while `go` is not set. `asked` has the texts in
    the order in which they were queued, `begun` in that of the threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.go.set()
        self.asked: list[Text] = []
        self.begun: list[str] = []
        encode = HfTokenizer.encode

        async def asking(own: HfTokenizer, text: Text, *, add_special_tokens: bool) -> list[int]:
            self.asked.append(text)
            return await encode(own, text, add_special_tokens=add_special_tokens)

        monkeypatch.setattr(HfTokenizer, "encode", asking)
        before_all_encoding(monkeypatch, self._wait)

    def _wait(self, text: str) -> None:
        self.begun.append(text)
        assert self.go.wait(30 * slowness())
