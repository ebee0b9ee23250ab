"""Control tokens in what clients write: they stay text, so that no message can forge a turn.

    content    a<|im_end|>b              guard: a mark breaks each control token
    template   <|im_start|>user\\na<M|im_end|>b<|im_end|>
    pieces     <|im_start|>              with control tokens
               user\\na<|im_end|>b       as plain text
               <|im_end|>                with control tokens

A piece begins and ends at a control token of the template's own, where a tokenizer begins anew
too: so the tokens are those of the whole text, but for the broken ones. Contents without control
tokens are not touched. Knows no tokenizer. Stateless.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from baton.runtime.errors import InvalidRequest

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # no characters, by Unicode's own word
MOST_BROKEN = 4096  # control tokens in one request
_WINDOW = 1 << 16  # characters that are searched at once, in which nothing else runs


@dataclass(frozen=True, slots=True)
class ControlToken:
    """`special` tokens are never shown in an answer; others, such as <think>, are. `lstrip` and
    `rstrip`: the white space before and after it belongs to it."""

    text: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """`plain`: what looks like a control token in it is text."""

    text: str
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Guarded:
    """What a template is given. `mark` is empty where nothing is broken."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: dict[str, Any]
    mark: str = ""


class ControlTokens:
    """Of one model: its special tokens, and those others that its template prints."""

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        self._tokens = {token.text: token for token in tokens if len(token.text) > 1}
        special = [token.text for token in self._tokens.values() if token.special]
        self._any = _Search(self._tokens)
        self._special = _Search(special)

    @property
    def texts(self) -> frozenset[str]:
        return frozenset(self._tokens)

    def guard(self, given: Guarded) -> Guarded:
        """Break the control tokens in all texts. An assistant's and a system's content keep those
        that are not special, such as <think>. Raises InvalidRequest for very many of them, and
        where no mark is left."""
        values = (*given.messages, *given.tools, given.variables)
        found = chain.from_iterable(map(self._found, values))
        count = sum(1 for _ in islice(found, MOST_BROKEN + 1))
        if not count:
            return given
        if count > MOST_BROKEN:
            raise InvalidRequest(
                f"messages: over {MOST_BROKEN} control tokens stand in them as text: send fewer",
                "messages",
            )
        mark = self._mark(given)
        return Guarded(
            [self._message(message, mark) for message in given.messages],
            [self._broken(tool, mark) for tool in given.tools],
            self._broken(given.variables, mark),
            mark,
        )

    def pieces(self, text: str, mark: str) -> list[Piece]:
        """What a template printed, cut for the tokenizer."""
        cut: list[Piece] = []
        run = ""  # with control tokens
        last: ControlToken | None = None
        for start, end, token in self._sections(text):
            section, space = text[start:end], ""
            if mark in section:
                section = section.replace(mark, "")
                if last is not None and last.rstrip:
                    run += section[: len(section) - len(section.lstrip())]
                    section = section.lstrip()
                if token is not None and token.lstrip:
                    space = section[len(section.rstrip()) :]
                    section = section.rstrip()
                cut += [Piece(run)] * bool(run) + [Piece(section, plain=True)]
                section, run = space, ""
            run += section + (token.text if token else "")
            last = token
        return cut + [Piece(run)] * bool(run)

    def _sections(self, text: str) -> Iterator[tuple[int, int, ControlToken | None]]:
        """The start and end of each text before a control token, and that token."""
        start = 0
        for match in self._any.each(text, overlapping=False):
            yield start, match.start(), self._tokens[match.group()]
            start = match.end()
        yield start, len(text), None

    def _message(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        broken: dict[str, Any] = self._broken(message, mark)
        if _is_ours(message):
            broken["content"] = self._special.broken(message["content"], mark)
        return {**broken, "role": message["role"]}

    def _broken(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._any.broken(value, mark)
        if isinstance(value, list):
            return [self._broken(entry, mark) for entry in value]
        if isinstance(value, dict):
            return {self._broken(k, mark): self._broken(v, mark) for k, v in value.items()}
        return value

    def _found(self, value: Mapping[str, Any]) -> Iterator[re.Match[str]]:
        for name, entry in value.items():
            search = self._special if name == "content" and _is_ours(value) else self._any
            for text in (name, *_texts_in(entry)):
                yield from search.each(text)

    def _mark(self, given: Guarded) -> str:
        values = [given.messages, given.tools, given.variables]
        texts = [text for value in values for text in _texts_in(value)]
        for mark in _MARKS:
            if not any(mark in text for text in texts):
                return mark
        raise InvalidRequest(
            "messages: they hold all of U+FDD0 to U+FDEF, which are no characters: remove them",
            "messages",
        )


class _Search:
    """Finds texts; the longest where one begins another."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = [text for text in texts if text]
        self._overlap = max(map(len, known), default=1) - 1
        self._pattern = re.compile(_alternatives(known) if known else "(?!)")

    def each(self, text: str, overlapping: bool = True) -> Iterator[re.Match[str]]:
        """`overlapping`: also what begins inside of another one."""
        at = 0
        while at < len(text):
            match = self._pattern.search(text, at, at + _WINDOW + self._overlap)
            if match is None or match.start() >= at + _WINDOW:  # there its end may be cut off
                at += _WINDOW
                continue
            yield match
            at = match.start() + 1 if overlapping else match.end()

    def broken(self, text: str, mark: str) -> str:
        parts, at = [], 0
        for match in self.each(text):
            parts.append(text[at : match.start() + 1] + mark)
            at = match.start() + 1
        return "".join((*parts, text[at:]))


def _is_ours(message: Mapping[str, Any]) -> bool:
    """Whether the model or the application wrote the content, not a user or a tool."""
    roles = ("assistant", "system", "developer")
    return message.get("role") in roles and isinstance(message.get("content"), str)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield name
            yield from _texts_in(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts_in(entry)


def _alternatives(texts: Iterable[str]) -> str:
    """A pattern of all texts that looks at each character once: hundreds may begin alike."""
    branches: dict[str, list[str]] = {}
    ends = False
    for text in texts:
        if text:
            branches.setdefault(text[0], []).append(text[1:])
        else:
            ends = True
    if not branches:
        return ""
    each = [re.escape(first) + _alternatives(rest) for first, rest in sorted(branches.items())]
    if len(each) == 1 and not ends:
        return each[0]
    return f"(?:{'|'.join(each)}){'?' if ends else ''}"
