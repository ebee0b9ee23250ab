"""The parts of grammars of calls: tools, and texts and patterns in Lark's form."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.router.grammars.constraint import MAX_CONSTRAINT_BYTES
from baton.runtime.errors import InvalidRequest
from baton.runtime.grammar.grammar_text import quoted

TokenId = Callable[[str], int | None]
_SLASH = re.compile(r"\\.|/", re.DOTALL)  # or an escape, whose sign is no slash to escape
ANYTHING = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class GrammarTool:
    """`schema` None: no schema was given. Arguments of a `free` tool need not follow it."""

    name: str
    schema: Mapping[str, Any] | None
    free: bool = False


class GrammarRules:
    """The rules of one grammar, as lines. No more are made than a constraint may have bytes."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._left = MAX_CONSTRAINT_BYTES

    def add(self, rule: str, tool: GrammarTool) -> None:
        """Add a rule of this tool. Raises InvalidRequest beyond the limit."""
        self._left -= len(rule.encode())
        if self._left < 0:
            raise InvalidRequest(
                f"tools: {tool.name}: the grammar of the calls has over {MAX_CONSTRAINT_BYTES} "
                "bytes: give fewer or smaller parameters",
                "tools",
            )
        self.lines.append(rule)


def spelled(text: str, markers: Sequence[str], token: TokenId) -> str:
    """Return the text as a Lark sequence, in which a marker that is a token is that token."""
    pattern = re.compile("(" + "|".join(map(re.escape, markers)) + ")")
    parts = []
    for part in filter(None, pattern.split(text)):
        known = token(part) if part in markers else None
        parts.append(quoted(part) if known is None else f"<[{known}]>")
    return " ".join(parts)


def regex(pattern: str) -> str:
    """Return a Lark pattern, in which a dot is any character."""
    return "/(?s:" + _SLASH.sub(_escaped, pattern) + ")/"


def _escaped(found: re.Match[str]) -> str:
    return r"\/" if found.group() == "/" else found.group()
