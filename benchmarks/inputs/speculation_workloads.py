"""Prompts for the speculation benchmark, in wordings that baton-tiny was trained on.

    chats   conversations of the held-out world, each with another content
    edits   a user sends a text again and again, each time with one change, and asks for all of it:
            the answer repeats the prompt and the answer before

Drawn from a seed alone; knows no engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baton.models.corpus import mix
from baton.models.corpus.words import ANIMALS, FOODS, OBJECTS

_TASKS = ("talk", "lists", "json", "story", "days", "units")
_LIST_ITEMS = 6  # as many as baton-tiny copies without a fault
_ORDERS = ("Copy this list", "Repeat this list", "Say after me")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A request's messages; requests of one `tenant` may learn from each other's output."""

    tenant: bytes
    messages: tuple[dict[str, Any], ...]

    @property
    def text(self) -> str:
        """The messages as baton-tiny's chat template puts them."""
        return chat_text(self.messages)


def chat_text(messages: Sequence[dict[str, Any]]) -> str:
    said = "".join(f"<|{each['role']}|>{each['content']}<|end|>" for each in messages)
    return f"{said}<|assistant|>"


def chats(seed: int, count: int) -> list[ChatPrompt]:
    """`count` conversations up to their last answer."""
    found: list[ChatPrompt] = []
    for number in range(count):
        task = _TASKS[number % len(_TASKS)]
        messages = mix.of_task(seed + number, task, held_out=True).messages
        found.append(ChatPrompt(b"chats", tuple(messages[:-1])))
    return found


def edits(seed: int, users: int, revisions: int) -> list[ChatPrompt]:
    """Each user's revisions follow each other; each user is a tenant."""
    return [prompt for user in range(users) for prompt in _revisions(seed, user, revisions)]


def _revisions(seed: int, user: int, revisions: int) -> Iterator[ChatPrompt]:
    choose = random.Random(f"{seed} {user}")
    words = choose.choice((OBJECTS, ANIMALS, FOODS))
    items = choose.sample(words, _LIST_ITEMS)
    order = choose.choice(_ORDERS)
    for _ in range(revisions):
        content = f"{order}: {', '.join(items)}"
        yield ChatPrompt(f"user {user}".encode(), ({"role": "user", "content": content},))
        items[choose.randrange(len(items))] = choose.choice(
            [word for word in words if word not in items]
        )
