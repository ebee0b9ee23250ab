"""Calls of tools in an answer's text, found as the text grows; each comes out when it is whole.

    text     ─▶ Let me see.\\n<tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>
    content  ─▶ Let me see.
    calls    ─▶ f({"a": 1})

What may yet become a call is held back, so nothing of one is ever shown; what cannot become one
any more is content, its markers too. Whitespace around a call belongs to it. Text is judged as
if it came character by character, so the result does not depend on how it was cut. Knows no
tokens and no transport. One parser serves one choice, and owns its state.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass

MOST_DEPTH = 64  # of lists and objects in a call
MOST_SPACE = 64  # characters of whitespace that are held for a call to come
_SPACE = " \t\r\n"
_WHITE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n;]*")  # bare calls
_HEADER = 200  # characters between a call's opening and its arguments
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9_-]*)?(?:\[ARGS\])?[ \t\r\n]*")
_ARGUMENTS = ("arguments", "parameters")  # what the forms call them
_BESIDE = {"name", "id", "type", *_ARGUMENTS}  # another member would be lost: then it is no call
_PLAIN = re.compile(r"[ \t\r\n0-9A-Za-z:,.+-]*")  # JSON outside strings, but for brackets
_STRING = re.compile(r'[^"\\\x00-\x1f]*')


@dataclass(frozen=True, slots=True)
class Form:
    """How a family of models writes calls: between `opening` and `closing` (or up to the end of
    the JSON, if that is empty) an object with a name and arguments. `bare`: the opening may be
    missing at the start of an answer and after another call. `listed`: a list of such objects,
    or a name and then its arguments, may stand there too. `markers`: all that may be special
    tokens."""

    opening: str
    closing: str = ""
    bare: bool = False
    listed: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        inside = ("[CALL_ID]", "[ARGS]") if self.listed else ()
        return tuple(filter(None, (self.opening, self.closing, *inside)))


# the most telling first: a bare object is looked for last
FORMS = {
    "mistral": Form("[TOOL_CALLS]", listed=True),
    "hermes": Form("<tool_call>", "</tool_call>"),
    "llama": Form("<|python_tag|>", bare=True),
}


@dataclass(frozen=True, slots=True)
class Calling:
    """What may be called in an answer: `names` in `form`; one call at most, if not `parallel`."""

    form: Form
    names: frozenset[str]
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """The call number `index` of a choice. `arguments` is a JSON object as the model wrote it."""

    index: int
    name: str
    arguments: str


def new_call_id() -> str:
    """Return an id for a call, by which a client sends its result."""
    return f"call_{secrets.token_hex(16)}"


class _NoCall(Exception):
    """What began like a call cannot be one."""


class CallParser:
    """`count` is the number of calls so far. `full` says that no more are wanted: what follows
    is neither content nor a call, and the choice should end."""

    def __init__(self, calling: Calling) -> None:
        self._form = calling.form
        self._names = calling.names
        self._parallel = calling.parallel
        self._held = ""
        self._start = 0  # of what is held yet, within one push
        self._begun: _Begun | None = None
        self._bare = calling.form.bare  # a call without its opening may begin here
        self._after_call = False
        self.count = 0
        self.full = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """The content and the calls that became certain with this text."""
        return self._advance(text, final=False)

    def flush(self) -> tuple[str, list[Call]]:
        """Those that the end of the answer makes certain: a call may lack its closing there."""
        return self._advance("", final=True)

    def _advance(self, text: str, final: bool) -> tuple[str, list[Call]]:
        self._held += text
        content: list[str] = []
        calls: list[Call] = []
        going = True
        while going and not self.full:
            if self._begun is None:
                going = self._seek(content, final)
            else:
                going = self._follow(self._begun, content, calls, final)
        self._let_go()
        return "".join(content), calls

    def _let_go(self) -> None:
        """Of all that has been shown or read; once a push, since the rest is copied."""
        if self.full:
            self._held = ""
        elif self._start:
            self._held = self._held[self._start :]
            if self._begun is not None:
                self._begun.moved(self._start)
        self._start = 0

    # -- outside a call ----------------------------------------------------------------------

    def _seek(self, content: list[str], final: bool) -> bool:
        """Show what is certain to be content. True: a call begins at what is held now."""
        if self._after_call:
            self._start = _skip(self._held, self._start)
        if self._bare:
            before = _skip(self._held, self._start, _BETWEEN)
            near = before - self._start < MOST_SPACE
            if near and before == len(self._held) and not final:
                return False
            if near and self._held[before : before + 1] == "{":
                self._begun = _Begun(self._form, before, before + 1)
                return True
        opening = self._held.find(self._form.opening, self._start)
        found = opening >= 0
        place = opening
        if not found:
            place = len(self._held) if final else self._possible_opening()
        if found or not final:
            first = max(self._start, place - MOST_SPACE)
            place = first + len(self._held[first:place].rstrip(_SPACE))
        self._show(place, content)
        if found:
            body = opening + len(self._form.opening)
            self._begun = _Begun(self._form, body, body)
        return found

    def _possible_opening(self) -> int:
        """The first place from which the held text may yet grow into the opening."""
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

    def _follow(self, begun: _Begun, content: list[str], calls: list[Call], final: bool) -> bool:
        try:
            end = begun.end(self._held, final)
            if end is None:
                return False
            found = self._read(begun)
        except _NoCall:
            self._begun = None
            self._show(begun.shown, content)
            return True
        for name, arguments in found if self._parallel else found[:1]:
            calls.append(Call(self.count, name, arguments))
            self.count += 1
        self.full = not self._parallel
        self._start = end
        self._begun = None
        self._after_call, self._bare = True, self._form.bare
        return True

    def _read(self, begun: _Begun) -> list[tuple[str, str]]:
        """Name and arguments of each call. Raises _NoCall unless all are good."""
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
                    raise _NoCall
                at = _skip(text, at + 1)
        except (ValueError, IndexError) as error:
            raise _NoCall from error

    def _call(self, members: dict[str, str]) -> tuple[str, str]:
        name = json.loads(members.get("name", "null"))
        given = [members[key] for key in _ARGUMENTS if key in members]
        if len(given) != 1 or not given[0].startswith("{") or not members.keys() <= _BESIDE:
            raise _NoCall
        return self._known(name), given[0]

    def _known(self, name: object) -> str:
        if not isinstance(name, str) or name not in self._names:
            raise _NoCall
        return name


class _Begun:
    """A call that has begun in the held text; whoever cuts that from the left says so by `moved`.
    `at` is where its opening ends; if it turns out to be none, what is before `shown` is
    content. `value` to `value_end` is its JSON, `name` stands before that or inside."""

    def __init__(self, form: Form, at: int, shown: int) -> None:
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
        """Where the call ends, None if that is not known yet. Raises _NoCall."""
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
                raise _NoCall
            return len(text) if final else None
        if final:
            raise _NoCall
        return None

    def _find_value(self, text: str) -> None:
        at = self._at = _skip(text, self._at)
        if at == len(text):
            return
        if text[at] != "{" and not self._form.listed:
            raise _NoCall
        if text[at] not in "{[":
            at = text.find("{", at, self._at + _HEADER)
            if at < 0:
                if len(text) >= self._at + _HEADER:
                    raise _NoCall
                return
            named = _NAMED.fullmatch(text, self._at, at)
            if named is None:
                raise _NoCall
            self.name = named[1]
        self.value = self._at = at

    def _find_value_end(self, text: str) -> None:
        """Follow the JSON to its closing bracket, from where it was left."""
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
            elif sign in "{[" and not self._in_string and self._depth < MOST_DEPTH:
                self._depth += 1
            elif sign in "}]" and not self._in_string:
                self._depth -= 1
            else:
                raise _NoCall
            if self._depth == 0:
                self.value_end = self._at
                return

    def _check_first_key(self, text: str) -> None:
        """Lets go of an answer in JSON that is no call, before all of it has come."""
        self._past_key = True
        if self.name is None and text[text.index('"') + 1 : -1] not in _BESIDE:
            raise _NoCall


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)


def _members(text: str, at: int) -> tuple[dict[str, str], int]:
    """The members of the JSON object that begins at `at`, their values as they are written, and
    where it ends. Raises ValueError, or IndexError past the end of the text."""
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
    """The first place from `at` on that is no whitespace, or none of the `signs`."""
    found = signs.match(text, at)
    assert found is not None, "it matches the empty text"
    return found.end()
