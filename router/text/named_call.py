"""Calls that are a name followed by arguments in JSON, as DeepSeek and gpt-oss write them.

<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>
<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.router.text.call_form import (
    MAX_HEADER_CHARS,
    CallableTools,
    NotACall,
    expected,
    skip,
)
from baton.router.text.json_call import JsonScanner, json_object


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """How a model writes calls, for grammars: the texts before the first call, the name and the
    arguments, and those that follow. `between` two calls; None: an answer has one call at most.
    `answer` stands before an answer that is no call."""

    before_name: str
    before_arguments: str
    after_arguments: str = ""
    first: str = ""
    between: str | None = None
    last: str = ""
    answer: str = ""


@dataclass(frozen=True, slots=True)
class NamedForm:
    """`header` matches all between an opening and the arguments, the name is its first group.
    `closings` follow the arguments; white space may stand before each."""

    openings: tuple[str, ...]
    header: re.Pattern[str]
    written: WrittenCall
    markers: tuple[str, ...]
    closings: tuple[str, ...] = ()
    epilogue: str = ""

    @property
    def bare(self) -> bool:
        return False

    def begin(self, opening: str, at: int) -> OpenNamedCall:
        del opening  # the header admits what may follow any of them
        return OpenNamedCall(self, at)


class OpenNamedCall:
    """`at` is the end of the call's opening."""

    def __init__(self, form: NamedForm, at: int) -> None:
        self._form = form
        self._at = at
        self.shown = at
        self._name: str | None = None
        self._json: JsonScanner | None = None
        self._closed = 0  # closings that were read

    @property
    def read(self) -> int:
        return self._at if self._json is None else max(self._at, self._json.at)

    def moved(self, count: int) -> None:
        self._at -= count
        self.shown -= count
        if self._json is not None:
            self._json.moved(count)

    def end(self, text: str, final: bool) -> int | None:
        if self._json is None:
            self._find_value(text)
        if self._json is None or not self._json.advance(text):
            if final:
                raise NotACall
            return None
        self._at = max(self._at, self._json.end)
        while self._closed < len(self._form.closings):
            closing = self._form.closings[self._closed]
            self._at = skip(text, self._at)
            if not expected(text, self._at, closing):
                return len(text) if final else None
            self._at += len(closing)
            self._closed += 1
        return self._at

    def _find_value(self, text: str) -> None:
        at = text.find("{", self._at, self._at + MAX_HEADER_CHARS)
        if at < 0:
            if len(text) >= self._at + MAX_HEADER_CHARS:
                raise NotACall
            return
        named = self._form.header.fullmatch(text, self._at, at)
        if named is None:
            raise NotACall
        self._name = named[1]
        self._json = JsonScanner(at)

    def calls(self, text: str, tools: CallableTools) -> list[tuple[str, str]]:
        assert self._json is not None
        return [(tools.known(self._name), json_object(text, self._json))]
