"""The channels of gpt-oss's answers (the harmony format), taken apart as the text grows.

    <|channel|>analysis<|message|>Let me see.<|end|>      reasoning   Let me see.
    <|start|>assistant<|channel|>final<|message|>Four.    content     Four.

An answer is a list of messages, each with a header. Calls of tools pass as they are written, for
the parser of calls. Text without a header is content. The result does not depend on how the text is
split. One parser serves one choice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MAX_HEADER_CHARS = 256
_ROLE = f"{START}assistant"
_HEADERS = (START, CHANNEL, " to=", "to=")
_BODY_ENDS = re.compile("|".join(map(re.escape, (END, RETURN, CALL, START, CHANNEL))))
_ENDS = (END, RETURN, CALL, START, CHANNEL)
_LONGEST = max(map(len, _ENDS))
_CHANNEL = re.compile(r"<\|channel\|>([a-z]+)")
_RECIPIENT = re.compile(r"to=[^\s<]")
_Part = Literal["header", "reasoning", "content", "call"]


@dataclass(frozen=True, slots=True)
class HarmonyForm:
    """The marks of a header in the tokenizer's vocabulary, where a grammar needs them."""

    start_token: int
    channel_token: int
    message_token: int
    end_token: int

    @property
    def markers(self) -> tuple[str, ...]:
        return (START, CHANNEL, "<|constrain|>", MESSAGE, END, RETURN, CALL)

    def envelope(self, *, whole: bool) -> str:
        """Return a Lark grammar of an answer with reasoning before it. The rule `@answer` is the
        last message if `whole`, else the body of the final one."""
        channel, message = f"<[{self.channel_token}]>", f"<[{self.message_token}]>"
        end = f'<[{self.end_token}]> <[{self.start_token}]> "assistant"'
        final = "" if whole else f'{channel} "final" {message} '
        return "\n".join(
            [
                f"start: analysis? {final}@answer",
                f'analysis: {channel} "analysis" {message} REASONING {end}',
                r"REASONING: /(.|\n)*/",
            ]
        )


class HarmonyParser:
    """Splits one choice's text. Reasoning is left out unless `shown`."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._held = ""
        self._start = 0  # of the held text, within one push
        self._part: _Part = "header"
        self._new = True  # no text of this message has come
        self._before: set[_Part] = set()  # parts that have text
        self._found: dict[_Part, list[str]] = {"reasoning": [], "content": []}

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that are certain with this text."""
        return self._advance(text, final=False)

    def flush(self) -> tuple[str, str]:
        """Return the rest at the end of the answer."""
        return self._advance("", final=True)

    def _advance(self, text: str, final: bool) -> tuple[str, str]:
        self._held += text
        self._found = {"reasoning": [], "content": []}
        while self._header(final) if self._part == "header" else self._body(final):
            pass
        self._held, self._start = self._held[self._start :], 0
        reasoning = "".join(self._found["reasoning"]) if self._shown else ""
        return reasoning, "".join(self._found["content"])

    def _header(self, final: bool) -> bool:
        """Read a header. Return whether there may be more to read. What is none is content."""
        begin = self._held[self._start : self._start + _LONGEST]
        if not any(each.startswith(begin) or begin.startswith(each) for each in _HEADERS):
            self._open("content")
            return True
        room = self._start + MAX_HEADER_CHARS
        end = self._held.find(MESSAGE, self._start, room)
        if end >= 0:
            header = self._held[self._start : end]
            body = end + len(MESSAGE)
            self._open(_part(header))
            if self._part == "call":
                self._give(self._held[self._start : body].removeprefix(_ROLE))
            self._start = body
            return True
        if not final and len(self._held) < room:
            return False
        if final and self._held.startswith(_ROLE, self._start):
            self._start += len(_ROLE)
        if final and not _RECIPIENT.search(self._held, self._start) and _is_mark(begin):
            self._start = len(self._held)  # a header that the end cut
            return False
        self._open("content")
        self._show(self._start + 1)  # a mark at this position is none
        return self._start < len(self._held)

    def _body(self, final: bool) -> bool:
        found = _BODY_ENDS.search(self._held, self._start)
        if found is None:
            self._show(len(self._held) if final else self._possible_end())
            return False
        self._show(found.start())
        mark = found.group()
        if mark in (END, RETURN, CALL):
            if mark == CALL and self._part == "call":
                self._give(mark)
            self._start = found.end()
        self._part = "header"
        return True

    def _possible_end(self) -> int:
        """Return the first index from which the held text may still become a mark."""
        length = len(self._held)
        for index in range(max(self._start, length - _LONGEST + 1), length):
            if any(mark.startswith(self._held[index:]) for mark in _ENDS):
                return index
        return length

    def _open(self, part: _Part) -> None:
        self._part, self._new = part, True

    def _show(self, end: int) -> None:
        if end > self._start:
            self._give(self._held[self._start : end])
            self._start = end

    def _give(self, text: str) -> None:
        """Add text of this message; a line break divides it from an earlier one of its part."""
        if self._new and self._part in self._before:
            text = "\n" + text
        self._new = False
        self._before.add(self._part)
        self._found["reasoning" if self._part == "reasoning" else "content"].append(text)


def _part(header: str) -> _Part:
    channel = _CHANNEL.search(header)
    if _RECIPIENT.search(header):
        return "call"
    return "reasoning" if channel is not None and channel[1] == "analysis" else "content"


def _is_mark(text: str) -> bool:
    return text.startswith((START, CHANNEL)) or any(
        each.startswith(text) for each in (START, CHANNEL)
    )
