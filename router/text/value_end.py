r"""Where a value in markup ends: at its first closing mark that is not within a string of JSON.

    <parameter=a>            text: ends at the first mark
    ["x</parameter>y"]       begins like JSON: the mark within the string is part of it
    </parameter>

A text that only begins like JSON ends at its first mark too. It is known to be no JSON at a line
break within a string, which stands after a mark as models write it, or at the next mark at the
latest. Each character is searched for marks once, and read as JSON at most once more. Where many
calls begin within one value, each of them reads on to its end: tool_calls.py bounds that. Owned by
one call.
"""

from __future__ import annotations

import re

from baton.router.text.call_form import SPACE, skip
from baton.router.text.json_call import STRICT_JSON

_WITHIN = re.compile(r'["\\\x00-\x1f]')  # a string: its end, an escape, or what it cannot contain


class ValueEnd:
    """The end of one value, which begins at `start` of the held text."""

    def __init__(self, mark: str, start: int) -> None:
        self._mark = mark
        self._start = start
        self._searched = start
        self._first: int | None = None  # where the first mark begins
        self._read = start  # as JSON, up to here
        self._in_string = False
        self._outside = re.compile(r'["\\]|' + re.escape(mark))

    @property
    def read(self) -> int:
        """Return up to where the text was read."""
        searched = self._searched if self._first is None else self._first + len(self._mark)
        return max(searched, self._read)

    def moved(self, count: int) -> None:
        """Follow a cut of `count` characters on the left of the held text."""
        self._start -= count
        self._searched -= count
        self._read -= count
        if self._first is not None:
            self._first -= count

    def find(self, text: str, final: bool) -> int | None:
        """Return where the mark begins that ends the value; None if that is not known yet, or if
        the `final` text has no mark."""
        if self._first is None:
            found = text.find(self._mark, self._searched)
            if found < 0:
                self._searched = max(self._start, len(text) - len(self._mark) + 1)
                return None
            self._first = found
            begin = skip(text, self._start)
            if text[begin] not in "[{":
                return found
        end = self._end_of_json(text)
        return self._first if end is None and final else end

    def _end_of_json(self, text: str) -> int | None:
        """Read on as JSON. Return the end of the value, once it is known."""
        while True:
            pattern = _WITHIN if self._in_string else self._outside
            found = pattern.search(text, self._read)
            if found is None:
                kept = 0 if self._in_string else len(self._mark) - 1
                self._read = max(self._read, len(text) - kept)
                return None
            self._read = found.end()
            if found.group() == '"':
                self._in_string = not self._in_string
            elif found.group() == self._mark:
                return found.start() if self._is_end(text, found.start()) else self._first
            elif found.group() != "\\" or not self._in_string:
                return self._first  # no JSON
            elif self._read == len(text):
                self._read -= 1  # an escape of which more may come
                return None
            else:
                self._read += 1

    def _is_end(self, text: str, at: int) -> bool:
        if at == self._first:
            return True
        written = text[self._start : at].strip(SPACE)
        try:
            return STRICT_JSON.raw_decode(written)[1] == len(written)
        except (ValueError, RecursionError):
            return False
