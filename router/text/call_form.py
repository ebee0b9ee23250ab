"""The interface of a form in which models write calls of tools, and what an answer may call.

A form says where a call may begin; its `OpenCall` follows one call to the end. The forms are in
json_call.py, named_call.py and markup_call.py; tool_calls.py finds calls of any form in a text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_HEADER_CHARS = 200  # from a call's opening to its arguments, and of a parameter's name
SPACE = " \t\r\n"
NAME = r"[A-Za-z0-9_.-]{1,64}"
_WHITE = re.compile(r"[ \t\r\n]*")


class NotACall(Exception):
    """A text that began like a call cannot be one."""


class OpenCall(Protocol):
    """A call that has begun in the held text. If it turns out to be none, the text before `shown`
    is content."""

    shown: int

    @property
    def read(self) -> int:
        """Return up to where it has read the held text."""
        ...

    def moved(self, count: int) -> None:
        """Follow a cut of `count` characters on the left of the held text."""
        ...

    def end(self, text: str, final: bool) -> int | None:
        """Return where the call ends, None if that is not known yet. Raises NotACall."""
        ...

    def calls(self, text: str, tools: CallableTools) -> list[tuple[str, str]]:
        """Return the name and the arguments of each call, once the end is known. Raises NotACall
        unless all are valid."""
        ...


class CallForm(Protocol):
    """`openings` begin a call; a text that begins with one of them is a call only as a whole.
    `bare`: at the start of an answer, and after a call, an object may be a call without an opening.
    `epilogue` may follow a call and belongs to it. `markers` may be special tokens."""

    @property
    def openings(self) -> tuple[str, ...]: ...

    @property
    def epilogue(self) -> str: ...

    @property
    def bare(self) -> bool: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    def begin(self, opening: str, at: int) -> OpenCall:
        """Begin a call after its `opening`, which ends at `at`; empty for a bare call."""
        ...


@dataclass(frozen=True, slots=True)
class CallableTools:
    """The tools that an answer may call: `names`, in `form`; only one call unless `parallel`.
    `parameters` has their schemas, by which untyped arguments are read."""

    form: CallForm
    names: frozenset[str]
    parallel: bool = True
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def known(self, name: object) -> str:
        """Return the name of a tool. Raises NotACall for any other value."""
        if not isinstance(name, str) or name not in self.names:
            raise NotACall
        return name


def skip(text: str, at: int, signs: re.Pattern[str] = _WHITE) -> int:
    """Return the first index from `at` on without whitespace, or without any of the `signs`."""
    found = signs.match(text, at)
    assert found is not None, "it matches the empty text"
    return found.end()


def expected(text: str, at: int, wanted: str) -> bool:
    """Return whether the text goes on with `wanted` at `at`; False if it ends before that is
    known. Raises NotACall if it goes on differently."""
    if text.startswith(wanted, at):
        return True
    if not wanted.startswith(text[at : at + len(wanted)]):
        raise NotACall
    return False
