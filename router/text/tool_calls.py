"""Tool calls in an answer's text, found as the text grows; each is returned when it is complete.

    text     ─▶ Let me see.\\n<tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>
    content  ─▶ Let me see.
    calls    ─▶ f({"a": 1})

Text that may still become a call is held back, so no part of a call is ever shown; text that cannot
become one is content, including its markers. Whitespace around a call belongs to it. The result is
the same as for text that comes character by character, however it is split. What looked like a call
and is none is read again, since a call may begin in it. That is bounded: beyond the bound the rest
of the answer is content. Knows no form of calls (call_forms.py), no tokens and no transport. One
parser serves one choice, and owns its state.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from baton.router.text.call_arguments import read_arguments
from baton.router.text.call_form import SPACE, CallableTools, NotACall, OpenCall, skip

MAX_SPACE = 64  # characters of whitespace that are held before a possible call
REREAD_CHARS = 64 << 10  # within what looked like calls, and REREAD_SHARE of the text before
REREAD_SHARE = 4
_BETWEEN = re.compile(r"[ \t\r\n;]*")  # bare calls


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """The call number `index` of a choice. `arguments` is a JSON object as the model wrote it."""

    index: int
    name: str
    arguments: str


def new_call_id() -> str:
    """Return an id for a call, by which a client sends its result."""
    return f"call_{secrets.token_hex(16)}"


class ToolCallParser:
    """`count` is the number of calls so far. If `full`, no more are allowed: what follows is
    neither content nor a call, and the choice should end."""

    def __init__(self, calling: CallableTools) -> None:
        self._tools = calling
        self._form = calling.form
        self._opening = re.compile("|".join(map(re.escape, calling.form.openings)))
        self._longest = max(map(len, calling.form.openings))
        self._held = ""
        self._start = 0  # of the held text, within one push
        self._dropped = 0  # characters before the held text
        self._reread = 0  # characters
        self._content_only = False
        self._begun: OpenCall | None = None
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
            self._dropped += self._start
            if self._begun is not None:
                self._begun.moved(self._start)
        self._start = 0

    # -- outside a call ----------------------------------------------------------------------

    def _seek(self, content: list[str], final: bool) -> bool:
        """Show what is certainly content. Return whether a call begins at the held text."""
        if self._content_only:
            self._show(len(self._held), content)
            return False
        if self._after_call and not self._skip_epilogue(final):
            return False
        if self._bare:
            before = skip(self._held, self._start, _BETWEEN)
            near = before - self._start < MAX_SPACE
            if near and before == len(self._held) and not final:
                return False
            if near and self._held[before : before + 1] == "{":
                self._begun = self._form.begin("", before)
                return True
        found = self._opening.search(self._held, self._start)
        index = len(self._held)
        if found:
            index = found.start()
        elif not final:
            index = self._possible_opening()
        if found or not final:
            first = max(self._start, index - MAX_SPACE)
            index = first + len(self._held[first:index].rstrip(SPACE))
        self._show(index, content)
        if found:
            self._begun = self._form.begin(found.group(), found.end())
        return found is not None

    def _skip_epilogue(self, final: bool) -> bool:
        """Skip what may follow a call. Return False if more of it may come."""
        self._start = skip(self._held, self._start)
        epilogue = self._form.epilogue
        rest = self._held[self._start : self._start + len(epilogue)]
        if not rest or not epilogue.startswith(rest):
            return True
        if rest != epilogue and not final:
            return False
        self._start = skip(self._held, self._start + len(rest))
        return True

    def _possible_opening(self) -> int:
        """Return the first index from which the held text may still become an opening."""
        length = len(self._held)
        for index in range(max(self._start, length - self._longest + 1), length):
            rest = self._held[index:]
            if any(opening.startswith(rest) for opening in self._form.openings):
                return index
        return length

    def _show(self, end: int, content: list[str]) -> None:
        if end > self._start:
            content.append(self._held[self._start : end])
            self._start = end
            self._bare = self._after_call = False

    # -- inside one --------------------------------------------------------------------------

    def _follow(
        self, begun: OpenCall, content: list[str], calls: list[ParsedCall], final: bool
    ) -> bool:
        try:
            end = begun.end(self._held, final)
            if end is None:
                return False
            found = begun.calls(self._held, self._tools)
            _check_arguments(found)
        except NotACall:
            self._begun = None
            self._reread += max(0, begun.read - begun.shown)
            allowed = REREAD_CHARS + REREAD_SHARE * (self._dropped + begun.read)
            self._content_only = self._reread > allowed
            self._show(begun.shown, content)
            return True
        parallel = self._tools.parallel
        for name, arguments in found if parallel else found[:1]:
            calls.append(ParsedCall(self.count, name, arguments))
            self.count += 1
        self.full = not parallel
        self._start = end
        self._begun = None
        self._after_call, self._bare = True, self._form.bare
        return True


def _check_arguments(calls: Sequence[tuple[str, str]]) -> None:
    """Raise NotACall for arguments that the router would refuse when a client sends them back."""
    try:
        for _, arguments in calls:
            read_arguments(arguments)
    except ValueError as error:
        raise NotACall from error
