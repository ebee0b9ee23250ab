"""The parts of grammars of calls: tools, and texts and patterns in Lark's form."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.runtime.grammar.grammar_text import quoted

TokenId = Callable[[str], int | None]
ANYTHING = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class GrammarTool:
    """`schema` None: no schema was given. Arguments of a `free` tool need not follow it."""

    name: str
    schema: Mapping[str, Any] | None
    free: bool = False


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
    return "/(?s:" + re.sub(r"(?<!\\)/", r"\\/", pattern) + ")/"
