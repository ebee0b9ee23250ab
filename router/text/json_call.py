"""Calls that are JSON objects with a name and arguments, as Hermes, Llama and Mistral write them.

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>

The JSON is followed character by character, and each character is read once.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from baton.router.text.call_form import (
    MAX_HEADER_CHARS,
    NAME,
    CallableTools,
    NotACall,
    expected,
    skip,
)

MAX_DEPTH = 64  # of lists and objects in a call
_NAMED = re.compile(rf"({NAME})(?:\[CALL_ID\][A-Za-z0-9_-]*)?(?:\[ARGS\])?[ \t\r\n]*")
_ARGUMENTS = ("arguments", "parameters")  # their names in the forms
_BESIDE = {"name", "id", "type", *_ARGUMENTS}  # with any other member it is no call
_PLAIN = re.compile(r"[ \t\r\n0-9A-Za-z:,.+-]*")  # JSON outside strings, without brackets
_STRING = re.compile(r'[^"\\\x00-\x1f]*')


@dataclass(frozen=True, slots=True)
class JsonForm:
    """Between `opening` and `closing` (or up to the end of the JSON if that is empty) stands an
    object with a name and arguments. `bare`: see `CallForm`. `listed`: a list of such objects, or
    a name followed by its arguments, is valid too."""

    opening: str
    closing: str = ""
    bare: bool = False
    listed: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.opening,)

    @property
    def epilogue(self) -> str:
        return ""

    @property
    def markers(self) -> tuple[str, ...]:
        inside = ("[CALL_ID]", "[ARGS]") if self.listed else ()
        return tuple(filter(None, (self.opening, self.closing, *inside)))

    def begin(self, opening: str, at: int) -> OpenJsonCall:
        return OpenJsonCall(self, at, at if opening else at + 1)


class JsonScanner:
    """Follows a JSON value to its end in a text that grows."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = -1  # unknown
        self.at = start
        self._depth = 0
        self._in_string = False
        self._key_end = -1

    def moved(self, count: int) -> None:
        self.start -= count
        self.at -= count
        self.end -= count if self.end >= 0 else 0
        self._key_end -= count if self._key_end >= 0 else 0

    def first_string(self, text: str) -> str | None:
        """Return the first string of the value, as it is written; None before its end."""
        if self._key_end < 0:
            return None
        return text[text.index('"', self.start) + 1 : self._key_end - 1]

    def advance(self, text: str) -> bool:
        """Read on. Return whether the end is known. Raises NotACall where no JSON can follow."""
        while self.end < 0 and self.at < len(text):
            found = (_STRING if self._in_string else _PLAIN).match(text, self.at)
            assert found is not None, "both match the empty text"
            self.at = found.end()
            sign = text[self.at : self.at + 1]
            if not sign or (sign == "\\" and self.at + 1 == len(text)):
                break
            self.at += 1
            self._take(sign)
        return self.end >= 0

    def _take(self, sign: str) -> None:
        if sign == '"':
            self._in_string = not self._in_string
            if not self._in_string and self._key_end < 0:
                self._key_end = self.at
        elif sign == "\\" and self._in_string:
            self.at += 1
        elif sign in "{[" and not self._in_string and self._depth < MAX_DEPTH:
            self._depth += 1
        elif sign in "}]" and not self._in_string:
            self._depth -= 1
        else:
            raise NotACall
        if self._depth == 0:
            self.end = self.at


class OpenJsonCall:
    """`at` is the end of the call's opening; its JSON has the name in it or after a name."""

    def __init__(self, form: JsonForm, at: int, shown: int) -> None:
        self._form = form
        self._at = at
        self.shown = shown
        self._name: str | None = None
        self._json: JsonScanner | None = None
        self._checked = False

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
        if self._json is None or not self._follow(self._json, text):
            if final:
                raise NotACall
            return None
        closing = self._form.closing
        if not closing:
            return self._json.end
        self._at = skip(text, max(self._at, self._json.end))
        if expected(text, self._at, closing):
            return self._at + len(closing)
        return len(text) if final else None

    def _follow(self, value: JsonScanner, text: str) -> bool:
        """Return whether the end is known. Raises NotACall at the first key of an answer in JSON
        that is no call, too."""
        known = value.advance(text)
        key = None if self._checked else value.first_string(text)
        if key is not None:
            self._checked = True
            if self._name is None and key not in _BESIDE:
                raise NotACall
        return known

    def _find_value(self, text: str) -> None:
        at = self._at = skip(text, self._at)
        if at == len(text):
            return
        if text[at] != "{" and not self._form.listed:
            raise NotACall
        if text[at] not in "{[":
            at = text.find("{", at, self._at + MAX_HEADER_CHARS)
            if at < 0:
                if len(text) >= self._at + MAX_HEADER_CHARS:
                    raise NotACall
                return
            named = _NAMED.fullmatch(text, self._at, at)
            if named is None:
                raise NotACall
            self._name = named[1]
        self._json = JsonScanner(at)

    def calls(self, text: str, tools: CallableTools) -> list[tuple[str, str]]:
        assert self._json is not None
        if self._name is not None:
            return [(tools.known(self._name), json_object(text, self._json))]
        at = self._json.start
        try:
            found = []
            listed = text[at] == "["
            at = skip(text, at + 1) if listed else at
            while True:
                members, at = _members(text, at)
                found.append(_call(members, tools))
                at = skip(text, at)
                if not listed or text[at] == "]":
                    return found
                if text[at] != ",":
                    raise NotACall
                at = skip(text, at + 1)
        except (ValueError, IndexError) as error:
            raise NotACall from error


def json_object(text: str, value: JsonScanner) -> str:
    """Return the object that was followed to its end. Raises NotACall unless it is one."""
    try:
        _members(text, value.start)
    except (ValueError, IndexError) as error:
        raise NotACall from error
    return text[value.start : value.end]


def _call(members: dict[str, str], tools: CallableTools) -> tuple[str, str]:
    name = json.loads(members.get("name", "null"))
    given = [members[key] for key in _ARGUMENTS if key in members]
    if len(given) != 1 or not given[0].startswith("{") or not members.keys() <= _BESIDE:
        raise NotACall
    return tools.known(name), given[0]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


STRICT_JSON = json.JSONDecoder(parse_constant=_refuse)


def _members(text: str, at: int) -> tuple[dict[str, str], int]:
    """Return the members of the JSON object that begins at `at`, with their values as written, and
    its end. Raises ValueError, or IndexError beyond the end of the text."""
    if text[at] != "{":
        raise ValueError("no object")
    members: dict[str, str] = {}
    at = skip(text, at + 1)
    while text[at] != "}" or members:
        key, at = STRICT_JSON.raw_decode(text, at)
        at = skip(text, at)
        if not isinstance(key, str) or key in members or text[at] != ":":
            raise ValueError("no member")
        start = skip(text, at + 1)
        _, at = STRICT_JSON.raw_decode(text, start)
        members[key] = text[start:at]
        at = skip(text, at)
        if text[at] == "}":
            break
        if text[at] != ",":
            raise ValueError("no comma")
        at = skip(text, at + 1)
    return members, at + 1
