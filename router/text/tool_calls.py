"""Tool calls in an answer's text, found as the text grows; each is returned when it is complete.

    text     ─▶ Let me see.\\n<tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>
    content  ─▶ Let me see.
    calls    ─▶ f({"a": 1})

Text that may still become a call is held back, so no part of a call is ever shown; text that cannot
become one is content, including its markers. Whitespace around a call belongs to it. The result is
the same as for text that comes character by character, however it is split. Knows no tokens and
no transport. One parser serves one choice, and owns its state.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass

MAX_DEPTH = 64  # of lists and objects in a call
MAX_SPACE = 64  # characters of whitespace that are held before a possible call
_SPACE = " \t\r\n"
_WHITE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n;]*")  # bare calls
_MAX_HEADER_CHARS = 200  # characters between a call's opening and its arguments
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9_-]*)?(?:\[ARGS\])?[ \t\r\n]*")
_ARGUMENTS = ("arguments", "parameters")  # their names in the forms
_BESIDE = {"name", "id", "type", *_ARGUMENTS}  # with any other member it is no call
_PLAIN = re.compile(r"[ \t\r\n0-9A-Za-z:,.+-]*")  # JSON outside strings, without brackets
_STRING = re.compile(r'[^"\\\x00-\x1f]*')


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a family of models writes calls: between `opening` and `closing` (or up to
    the end of the JSON if that is empty) an object with a name and arguments. `bare`: the opening
    may be missing at the start of an answer and after another call. `listed`: a list of such
    objects, or a name followed by its arguments, is valid too. `markers` may be special tokens."""

    opening: str
    closing: str = ""
    bare: bool = False
    listed: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        inside = ("[CALL_ID]", "[ARGS]") if self.listed else ()
        return tuple(filter(None, (self.opening, self.closing, *inside)))


# The most distinctive form first, bare objects last.
FORMS = {
    "mistral": CallForm("[TOOL_CALLS]", listed=True),
    "hermes": CallForm("<tool_call>", "</tool_call>"),
    "llama": CallForm("<|python_tag|>", bare=True),
}


@dataclass(frozen=True, slots=True)
class CallableTools:
    """The tools that an answer may call: `names`, in `form`; only one call unless `parallel`."""

    form: CallForm
    names: frozenset[str]
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """The call number `index` of a choice. `arguments` is a JSON object as the model wrote it."""

    index: int
    name: str
    arguments: str


def new_call_id() -> str:
    """Return an id for a call, by which a client sends its result."""
    return f"call_{secrets.token_hex(16)}"


class _NotACall(Exception):
    """A text that began like a call cannot be one."""


class ToolCallParser:
    """`count` is the number of calls so far. If `full`, no more are allowed: what follows is
    neither content nor a call, and the choice should end."""

    def __init__(self, calling: CallableTools) -> None:
        self._form = calling.form
        self._names = calling.names
        self._parallel = calling.parallel
        self._held = ""
        self._start = 0  # of the held text, within one push
        self._begun: _OpenCall | None = None
        self._bare = calling.form.bare  # a call without its opening may begin here
        self._after_call = False
        self.count = 0
        self.full = False

    def push(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Return the content and the calls that are certain with this text."""
        return self._advance(text, final=False)

    def flush(self) -> tuple[str, list[ParsedCall]]:
        """Return the rest at the end of the answer, where a call may lack its closing."""
        return self._advance("", final=True)

    def _advance(self, text: str, final: bool) -> tuple[str, list[ParsedCall]]:
        self._held += text
        content: list[str] = []
        calls: list[ParsedCall] = []
        going = True
        while going and not self.full:
            if self._begun is None:
                going = self._seek(content, final)
            else:
                going = self._follow(self._begun, content, calls, final)
        self._drop_read()
        return "".join(content), calls

    def _drop_read(self) -> None:
        """Drop all text that was shown or read; once for each push, since the rest is copied."""
        if self.full:
            self._held = ""
        elif self._start:
            self._held = self._held[self._start :]
            if self._begun is not None:
                self._begun.moved(self._start)
        self._start = 0

    # -- outside a call ----------------------------------------------------------------------

    def _seek(self, content: list[str], final: bool) -> bool:
        """Show what is certainly content. Return whether a call begins at the held text."""
        if self._after_call:
            self._start = _skip(self._held, self._start)
        if self._bare:
            before = _skip(self._held, self._start, _BETWEEN)
            near = before - self._start < MAX_SPACE
            if near and before == len(self._held) and not final:
                return False
            if near and self._held[before : before + 1] == "{":
                self._begun = _OpenCall(self._form, before, before + 1)
                return True
        opening = self._held.find(self._form.opening, self._start)
        found = opening >= 0
        place = opening
        if not found:
            place = len(self._held) if final else self._possible_opening()
        if found or not final:
            first = max(self._start, place - MAX_SPACE)
            place = first + len(self._held[first:place].rstrip(_SPACE))
        self._show(place, content)
        if found:
            body = opening + len(self._form.opening)
            self._begun = _OpenCall(self._form, body, body)
        return found

    def _possible_opening(self) -> int:
        """Return the first index from which the held text may still become the opening."""
        length = len(self._held)
        for place in range(max(self._start, length - len(self._form.opening) + 1), length):
            if self._form.opening.startswith(self._held[place:]):
                return place
        return length

    def _show(self, end: int, content: list[str]) -> None:
        if end > self._start:
            content.append(self._held[self._start : end])
            self._start = end
            self._bare = self._after_call = False

    # -- inside one --------------------------------------------------------------------------

    def _follow(
        self, begun: _OpenCall, content: list[str], calls: list[ParsedCall], final: bool
    ) -> bool:
        try:
            end = begun.end(self._held, final)
            if end is None:
                return False
            found = self._read(begun)
        except _NotACall:
            self._begun = None
            self._show(begun.shown, content)
            return True
        for name, arguments in found if self._parallel else found[:1]:
            calls.append(ParsedCall(self.count, name, arguments))
            self.count += 1
        self.full = not self._parallel
        self._start = end
        self._begun = None
        self._after_call, self._bare = True, self._form.bare
        return True

    def _read(self, begun: _OpenCall) -> list[tuple[str, str]]:
        """Return name and arguments of each call. Raises _NotACall unless all are valid."""
        text, at = self._held, begun.value
        try:
            if begun.name is not None:
                _members(text, at)
                return [(self._known(begun.name), text[at : begun.value_end])]
            found = []
            listed = text[at] == "["
            at = _skip(text, at + 1) if listed else at
            while True:
                members, at = _members(text, at)
                found.append(self._call(members))
                at = _skip(text, at)
                if not listed or text[at] == "]":
                    return found
                if text[at] != ",":
                    raise _NotACall
                at = _skip(text, at + 1)
        except (ValueError, IndexError) as error:
            raise _NotACall from error

    def _call(self, members: dict[str, str]) -> tuple[str, str]:
        name = json.loads(members.get("name", "null"))
        given = [members[key] for key in _ARGUMENTS if key in members]
        if len(given) != 1 or not given[0].startswith("{") or not members.keys() <= _BESIDE:
            raise _NotACall
        return self._known(name), given[0]

    def _known(self, name: object) -> str:
        if not isinstance(name, str) or name not in self._names:
            raise _NotACall
        return name


class _OpenCall:
    """A call that has begun in the held text; `moved` reports that the text was cut on the left.
    `at` is the end of its opening; if it is no call, the text before `shown` is content. `value`
    to `value_end` is its JSON, with `name` before or in it."""

    def __init__(self, form: CallForm, at: int, shown: int) -> None:
        self._form = form
        self._at = at
        self.shown = shown
        self.name: str | None = None
        self.value = -1
        self.value_end = -1
        self._depth = 0
        self._in_string = False
        self._past_key = False

    def moved(self, count: int) -> None:
        self._at -= count
        self.shown -= count
        self.value -= count if self.value >= 0 else 0
        self.value_end -= count if self.value_end >= 0 else 0

    def end(self, text: str, final: bool) -> int | None:
        """Return where the call ends, None if that is not known yet. Raises _NotACall."""
        if self.value < 0:
            self._find_value(text)
        if self.value >= 0 > self.value_end:
            self._find_value_end(text)
        closing = self._form.closing
        if self.value_end >= 0:
            if not closing:
                return self.value_end
            self._at = _skip(text, self._at)
            if text.startswith(closing, self._at):
                return self._at + len(closing)
            if not closing.startswith(text[self._at : self._at + len(closing)]):
                raise _NotACall
            return len(text) if final else None
        if final:
            raise _NotACall
        return None

    def _find_value(self, text: str) -> None:
        at = self._at = _skip(text, self._at)
        if at == len(text):
            return
        if text[at] != "{" and not self._form.listed:
            raise _NotACall
        if text[at] not in "{[":
            at = text.find("{", at, self._at + _MAX_HEADER_CHARS)
            if at < 0:
                if len(text) >= self._at + _MAX_HEADER_CHARS:
                    raise _NotACall
                return
            named = _NAMED.fullmatch(text, self._at, at)
            if named is None:
                raise _NotACall
            self.name = named[1]
        self.value = self._at = at

    def _find_value_end(self, text: str) -> None:
        """Continue to follow the JSON to its closing bracket."""
        while self._at < len(text):
            found = (_STRING if self._in_string else _PLAIN).match(text, self._at)
            assert found is not None, "both match the empty text"
            self._at = found.end()
            sign = text[self._at : self._at + 1]
            if not sign or (sign == "\\" and self._at + 1 == len(text)):
                return
            self._at += 1
            if sign == '"':
                self._in_string = not self._in_string
                if not self._in_string and not self._past_key:
                    self._check_first_key(text[self.value : self._at])
            elif sign == "\\" and self._in_string:
                self._at += 1
            elif sign in "{[" and not self._in_string and self._depth < MAX_DEPTH:
                self._depth += 1
            elif sign in "}]" and not self._in_string:
                self._depth -= 1
            else:
                raise _NotACall
            if self._depth == 0:
                self.value_end = self._at
                return

    def _check_first_key(self, text: str) -> None:
        """Raises _NotACall at the first key of an answer in JSON that is no call."""
        self._past_key = True
        if self.name is None and text[text.index('"') + 1 : -1] not in _BESIDE:
            raise _NotACall


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)


def _members(text: str, at: int) -> tuple[dict[str, str], int]:
    """Return the members of the JSON object that begins at `at`, with their values as written, and
    its end. Raises ValueError, or IndexError beyond the end of the text."""
    if text[at] != "{":
        raise ValueError("no object")
    members: dict[str, str] = {}
    at = _skip(text, at + 1)
    while text[at] != "}" or members:
        key, at = _JSON.raw_decode(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or key in members or text[at] != ":":
            raise ValueError("no member")
        start = _skip(text, at + 1)
        _, at = _JSON.raw_decode(text, start)
        members[key] = text[start:at]
        at = _skip(text, at)
        if text[at] == "}":
            break
        if text[at] != ",":
            raise ValueError("no comma")
        at = _skip(text, at + 1)
    return members, at + 1


def _skip(text: str, at: int, signs: re.Pattern[str] = _WHITE) -> int:
    """Return the first index from `at` on without whitespace, or without any of the `signs`."""
    found = signs.match(text, at)
    assert found is not None, "it matches the empty text"
    return found.end()
