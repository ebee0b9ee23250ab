"""The reasoning of a model, taken out of its answer's text as the text grows.

    text        <think>\nLet me see.\n</think>\n\nIt is 4.
    reasoning   Let me see.
    content     It is 4.

Qwen3, DeepSeek-R1 and GLM write this form. The prompt may have opened the reasoning already. White
space around both parts belongs to the marks. The result does not depend on how the text is split.
Knows no tokens. One parser serves one choice. The form of gpt-oss is in harmony.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.router.text.harmony import HarmonyForm, HarmonyParser

_SPACE = " \t\r\n"
MAX_SPACE = 64  # characters of white space that are held at the end of reasoning


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """`opening_token` and `closing_token` are the marks in the tokenizer's vocabulary."""

    opening: str
    closing: str
    opening_token: int
    closing_token: int

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing)


class AnswerParser(Protocol):
    """Splits one choice's text into reasoning and content."""

    def push(self, text: str) -> tuple[str, str]: ...

    def flush(self) -> tuple[str, str]: ...


@dataclass(frozen=True, slots=True)
class AnswerReasoning:
    """The reasoning of one answer. `opened`: the prompt ends inside it. Unless `shown`, it is
    left out of the answer."""

    form: ReasoningForm | HarmonyForm
    opened: bool
    shown: bool = True

    def parser(self) -> AnswerParser:
        if isinstance(self.form, HarmonyForm):
            return HarmonyParser(shown=self.shown)
        return ReasoningParser(self.form, self.opened, self.shown)


class ReasoningParser:
    """Splits one choice's text by two marks."""

    def __init__(self, form: ReasoningForm, opened: bool, shown: bool) -> None:
        self._form = form
        self._shown = shown
        self._inside = opened
        self._begun = opened  # what the text begins with is known
        self._leading = True  # white space that comes now is not shown
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that are certain with this text."""
        return self._advance(text, final=False)

    def flush(self) -> tuple[str, str]:
        """Return the rest at the end of the answer."""
        return self._advance("", final=True)

    def _advance(self, text: str, final: bool) -> tuple[str, str]:
        self._held += text
        reasoning = ""
        if not self._begun and not self._begin(final):
            return "", ""
        if self._inside:
            reasoning = self._reasoning(final)
        content = ""
        if not self._inside:
            content, self._held = self._held, ""
            if self._leading:
                content = content.lstrip(_SPACE)
                self._leading = not content
        return reasoning if self._shown else "", content

    def _begin(self, final: bool) -> bool:
        """Return whether it is known what the text begins with."""
        start = self._held.lstrip(_SPACE)
        opening = self._form.opening
        possible = len(start) < len(opening) and opening.startswith(start)
        if possible and not final and len(self._held) - len(start) < MAX_SPACE:
            return False
        self._begun = True
        if start.startswith(opening):
            self._inside = True
            self._held = start[len(opening) :]
        else:
            self._leading = False
        return True

    def _reasoning(self, final: bool) -> str:
        """Take the reasoning that is certain; the text after its end stays held."""
        found = self._held.find(self._form.closing)
        if found >= 0:
            shown, self._held = self._held[:found].rstrip(_SPACE), self._held[found:]
            self._held = self._held[len(self._form.closing) :]
            self._inside = False
            lead, self._leading = self._leading, True
            return shown.lstrip(_SPACE) if lead else shown
        end = len(self._held) if final else self._certain()
        shown, self._held = self._held[:end], self._held[end:]
        if self._leading:
            shown = shown.lstrip(_SPACE)
            self._leading = not shown
        return shown

    def _certain(self) -> int:
        """Return up to where the held text is neither the closing mark nor space before it."""
        length, closing = len(self._held), self._form.closing
        index = length
        for start in range(max(0, length - len(closing) + 1), length):
            if closing.startswith(self._held[start:]):
                index = start
                break
        bare = len(self._held[:index].rstrip(_SPACE))
        return max(bare, index - MAX_SPACE)
