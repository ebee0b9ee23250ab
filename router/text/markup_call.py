"""Calls whose arguments are written one by one in markup, as Qwen3-Coder and GLM write them.

    <tool_call>                     <tool_call>f
    <function=f>                    <arg_key>a</arg_key>
    <parameter=a>                   <arg_value>1</arg_value>
    1                               </tool_call>
    </parameter>
    </function>
    </tool_call>

A value has no type: the schema of the tool says how it is read (markup_value.py). It ends at the
first closing mark (value_end.py), which only a string within JSON can contain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from baton.router.text.call_form import (
    MAX_HEADER_CHARS,
    NAME,
    CallableTools,
    NotACall,
    expected,
    skip,
)
from baton.router.text.markup_value import json_value
from baton.router.text.value_end import ValueEnd

_NAME = re.compile(NAME)
_AFTER_GLM_NAME = re.compile(r"[ \t\r\n<]")
Stage = Literal["name", "key", "value", "closing"]


@dataclass(frozen=True, slots=True)
class MarkupForm:
    """The marks of a call, in the order in which they stand; `closing` may be empty. `padded`: a
    line break stands at both ends of a value."""

    openings: tuple[str, ...]
    name: str
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    end: str
    closing: str
    padded: bool
    markers: tuple[str, ...]
    epilogue: str = ""

    @property
    def bare(self) -> bool:
        return False

    def begin(self, opening: str, at: int) -> OpenMarkupCall:
        return OpenMarkupCall(self, opening, at)


class OpenMarkupCall:
    """`opening` ends at `at`. Arguments are copied when they are complete."""

    def __init__(self, form: MarkupForm, opening: str, at: int) -> None:
        self._form = form
        self._at = at
        self.shown = at
        self._stage: Stage = "name"
        self._within = opening == form.openings[0]
        self._mark_read = opening == form.name  # the mark before what the stage reads
        self._name = ""
        self._key = ""
        self._value_end = ValueEnd(form.value_end, at)
        self._values: dict[str, str] = {}

    @property
    def read(self) -> int:
        return max(self._at, self._value_end.read)

    def moved(self, count: int) -> None:
        self._at -= count
        self.shown -= count
        self._value_end.moved(count)

    def end(self, text: str, final: bool) -> int | None:
        while self._stage != "closing":
            if not self._step(text, final):
                if final and self._cut_in_end(text):
                    return len(text)
                if final:
                    raise NotACall
                return None
        if not self._form.closing or not self._within:
            return self._at
        self._at = skip(text, self._at)
        if expected(text, self._at, self._form.closing):
            return self._at + len(self._form.closing)
        return len(text) if final else None

    def _step(self, text: str, final: bool) -> bool:
        """Read on by one part of the call. Return False if more text is needed."""
        if self._stage == "value":
            return self._read_value(text, final)
        return self._read_name(text) if self._stage == "name" else self._read_key(text)

    def _cut_in_end(self, text: str) -> bool:
        """Return whether the text ends within the mark after the last argument."""
        rest = text[skip(text, self._at) :]
        return self._stage == "key" and rest.startswith("</") and self._form.end.startswith(rest)

    def _read_name(self, text: str) -> bool:
        form = self._form
        if not self._mark_read:
            self._at = skip(text, self._at)
            if not expected(text, self._at, form.name):
                return False
            self._at += len(form.name)
            self._mark_read = True
        if form.name_end:
            end = self._bounded(text, form.name_end)
        else:
            self._at = skip(text, self._at)
            found = _AFTER_GLM_NAME.search(text, self._at, self._at + MAX_HEADER_CHARS)
            end = found.start() if found else -1
            if end < 0:
                self._check_room(text)
        if end < 0:
            return False
        self._name = text[self._at : end]
        if _NAME.fullmatch(self._name) is None:
            raise NotACall
        self._at = end + len(form.name_end)
        self._stage = "key"
        return True

    def _read_key(self, text: str) -> bool:
        """Read a parameter's name, or the mark after the last argument."""
        form = self._form
        at = self._at = skip(text, self._at)
        if text.startswith(form.end, at):
            self._at = at + len(form.end)
            self._stage = "closing"
            return True
        if not text.startswith(form.key, at):
            rest = text[at : at + max(len(form.key), len(form.end))]
            if not form.key.startswith(rest) and not form.end.startswith(rest):
                raise NotACall
            return False
        end = self._bounded(text, form.key_end, len(form.key))
        if end < 0:
            return False
        key = text[at + len(form.key) : end]
        after = end + len(form.key_end)
        if form.value:
            after = skip(text, after)
            if after - end > MAX_HEADER_CHARS:
                raise NotACall
            if not expected(text, after, form.value):
                return False
            after += len(form.value)
        if not key or key in self._values:
            raise NotACall
        self._key, self._at = key, after
        self._value_end = ValueEnd(form.value_end, after)
        self._stage = "value"
        return True

    def _read_value(self, text: str, final: bool) -> bool:
        end = self._value_end.find(text, final)
        if end is None:
            return False
        value = text[self._at : end]
        if self._form.padded:
            value = value.removeprefix("\n").removesuffix("\n")
        self._values[self._key] = value
        self._at = end + len(self._form.value_end)
        self._stage = "key"
        return True

    def _bounded(self, text: str, mark: str, after: int = 0) -> int:
        """Return where the mark begins; -1 if it may still come."""
        start = self._at + after
        end = text.find(mark, start, start + MAX_HEADER_CHARS)
        if end < 0:
            self._check_room(text, after)
        return end

    def _check_room(self, text: str, after: int = 0) -> None:
        if len(text) >= self._at + after + MAX_HEADER_CHARS:
            raise NotACall

    def calls(self, text: str, tools: CallableTools) -> list[tuple[str, str]]:
        del text  # read already
        name = tools.known(self._name)
        schema: Mapping[str, Any] = tools.parameters.get(name, {})
        members = (
            f"{json.dumps(key, ensure_ascii=False)}: {json_value(value, key, schema)}"
            for key, value in self._values.items()
        )
        return [(name, "{" + ", ".join(members) + "}")]
