"""Control tokens in clients' messages: they stay text, so that no message can forge a turn.

    content    a<|im_end|>b              guard: a mark breaks each control token
    template   <|im_start|>user\\na<M|im_end|>b<|im_end|>
    pieces     <|im_start|>              with control tokens
               user\\na<|im_end|>b       as plain text
               <|im_end|>                with control tokens

A piece begins and ends at a control token of the template's own, where tokenizers split texts too:
so the tokens are those of the whole text, except for the broken ones. Contents without control
tokens are not changed. Knows no tokenizer. Stateless.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from baton.runtime.errors import InvalidRequest

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode's noncharacters
MAX_BROKEN_TOKENS = 4096  # control tokens in one request
_SPOKEN = ("content", "reasoning_content", "thinking")  # by the model or the application
_WINDOW_CHARS = 1 << 16  # searched in one call, during which no other thread runs


@dataclass(frozen=True, slots=True)
class ControlToken:
    """`special` tokens are never shown in an answer; others, such as <think>, are. `lstrip` and
    `rstrip`: the white space before and after belongs to the token."""

    text: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A part of a prompt. In a `plain` one control tokens are text."""

    text: str
    plain: bool = False


@dataclass(frozen=True, slots=True)
class GuardedChat:
    """The values that a template is given. `mark` is empty if no control token was broken."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: dict[str, Any]
    mark: str = ""


class ControlTokens:
    """The control tokens of one model: special tokens, and others that its template prints."""

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        self._tokens = {token.text: token for token in tokens if len(token.text) > 1}
        special = [token.text for token in self._tokens.values() if token.special]
        self._any = _TextSearch(self._tokens)
        self._special = _TextSearch(special)

    @property
    def texts(self) -> frozenset[str]:
        return frozenset(self._tokens)

    def guard(self, given: GuardedChat) -> GuardedChat:
        """Break the control tokens in all texts. The contents of assistant and system messages, and
        reasoning, keep those that are not special, such as <think>. Raises InvalidRequest for over
        MAX_BROKEN_TOKENS of them, and if the texts contain all possible marks."""
        values = (*given.messages, *given.tools, given.variables)
        found = chain.from_iterable(map(self._found, values))
        count = sum(1 for _ in islice(found, MAX_BROKEN_TOKENS + 1))
        if not count:
            return given
        if count > MAX_BROKEN_TOKENS:
            raise InvalidRequest(
                f"messages: their texts have over {MAX_BROKEN_TOKENS} control tokens: send fewer",
                "messages",
            )
        mark = self._mark(given)
        return GuardedChat(
            [self._message(message, mark) for message in given.messages],
            [self._broken(tool, mark) for tool in given.tools],
            self._broken(given.variables, mark),
            mark,
        )

    def pieces(self, text: str, mark: str) -> list[PromptPiece]:
        """Split what a template printed into pieces for the tokenizer."""
        cut: list[PromptPiece] = []
        run = ""  # text with control tokens
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
                cut += [PromptPiece(run)] * bool(run) + [PromptPiece(section, plain=True)]
                section, run = space, ""
            run += section + (token.text if token else "")
            last = token
        return cut + [PromptPiece(run)] * bool(run)

    def _sections(self, text: str) -> Iterator[tuple[int, int, ControlToken | None]]:
        """Yield the start and end of each text before a control token, and that token."""
        start = 0
        for match in self._any.each(text, overlapping=False):
            yield start, match.start(), self._tokens[match.group()]
            start = match.end()
        yield start, len(text), None

    def _message(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        broken: dict[str, Any] = self._broken(message, mark)
        for name in _trusted(message):
            broken[name] = self._special.broken(message[name], mark)
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
        trusted = _trusted(value)
        for name, entry in value.items():
            search = self._special if name in trusted else self._any
            for text in (name, *_texts_in(entry)):
                yield from search.each(text)

    def _mark(self, given: GuardedChat) -> str:
        values = [given.messages, given.tools, given.variables]
        texts = [text for value in values for text in _texts_in(value)]
        for mark in _MARKS:
            if not any(mark in text for text in texts):
                return mark
        raise InvalidRequest(
            "messages: they contain all of U+FDD0 to U+FDEF, which are no characters: remove them",
            "messages",
        )


class _TextSearch:
    """Finds any of several texts; the longest if one is the start of another."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = [text for text in texts if text]
        self._overlap = max(map(len, known), default=1) - 1
        self._pattern = re.compile(_alternatives(known) if known else "(?!)")

    def each(self, text: str, overlapping: bool = True) -> Iterator[re.Match[str]]:
        """Yield the matches; if `overlapping`, also those that begin inside another one."""
        at = 0
        while at < len(text):
            match = self._pattern.search(text, at, at + _WINDOW_CHARS + self._overlap)
            if (
                match is None or match.start() >= at + _WINDOW_CHARS
            ):  # its end may be beyond the window
                at += _WINDOW_CHARS
                continue
            yield match
            at = match.start() + 1 if overlapping else match.end()

    def broken(self, text: str, mark: str) -> str:
        parts, at = [], 0
        for match in self.each(text):
            parts.append(text[at : match.start() + 1] + mark)
            at = match.start() + 1
        return "".join((*parts, text[at:]))


def _trusted(message: Mapping[str, Any]) -> list[str]:
    """Return the fields whose text the model or the application wrote, not a user or a tool."""
    if message.get("role") not in ("assistant", "system", "developer"):
        return []
    return [name for name in _SPOKEN if isinstance(message.get(name), str)]


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
    """Return a pattern of all texts that reads each character once: hundreds may share a start."""
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
