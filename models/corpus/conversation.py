"""The parts of the corpus: conversations in the form that chat templates take, and scenes.

A scene is what one conversation is drawn from: random choices, the names that are taken, and
the side of the split. What is asked in a conversation (a sum, a list, the owner of an object) is
its content; each content belongs to the training side or to the held-out side by its hash, so that
nothing that evaluation asks was ever trained on. Knows no tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

from baton.models.corpus.words import NAMES

Message = dict[str, Any]
Content = TypeVar("Content", bound=tuple[object, ...])
_HELD_OUT_OF = 8  # one content in eight is held out


@dataclass(frozen=True, slots=True)
class Episode:
    """A task within a conversation. `parts` are runs of messages that end with an assistant's;
    other episodes may come between two parts. All assistant messages follow from what is
    before them, so each is the one right answer."""

    task: str
    parts: tuple[tuple[Message, ...], ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """`tasks` names, for each message, the task that it belongs to."""

    messages: tuple[Message, ...]
    tasks: tuple[str, ...]
    tools: tuple[Message, ...]
    contents: frozenset[str]


@dataclass(slots=True)
class Scene:
    """Where a conversation is drawn; see the module's head. Owned by its caller."""

    choose: random.Random
    held_out: bool
    tools: tuple[Message, ...] = ()
    taken: set[str] = field(default_factory=set)  # names, and kinds of episode that come once
    contents: set[str] = field(default_factory=set)

    def fresh(self, kind: str, draw: Callable[[], Content]) -> Content:
        """Return the result of `draw`, repeated until it lies on this scene's side of the split."""
        while is_held_out(text := f"{kind}:{(content := draw())}") != self.held_out:
            pass
        self.contents.add(text)
        return content

    def free_names(self) -> list[str]:
        return [name for name in NAMES if name not in self.taken]

    def take(self, *names: str) -> None:
        self.taken.update(names)


def is_held_out(content: str) -> bool:
    return blake2b(content.encode(), digest_size=8).digest()[0] % _HELD_OUT_OF == 0


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def call(name: str, arguments: dict[str, object]) -> Message:
    """An assistant's message that calls one tool."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": function}],
    }


def exchange(task: str, *texts: str) -> Episode:
    """An episode in one part: the user's text, the assistant's, and so on."""
    return Episode(task, (turns(texts),))


def turns(texts: Sequence[str]) -> tuple[Message, ...]:
    return tuple(assistant(text) if at % 2 else user(text) for at, text in enumerate(texts))
