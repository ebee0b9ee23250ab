"""Whole conversations of many episodes, from a seed, for training or held out.

A conversation grows until it is as long as asked; second parts of episodes (the
questions about earlier statements) come later, in between or at the end. Lengths are measured by
the caller's own measure, so this knows no tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

from baton.models.corpus import first_exchanges, forms, lists, memory, numbers, talk
from baton.models.corpus.conversation import Conversation, Episode, Message, Scene

Measure = Callable[[Sequence[Message]], int]  # tokens of some messages in a conversation
Kind = Callable[[Scene], Episode]

TASKS: dict[str, tuple[Kind, float]] = {  # with the weight in the mix, by episodes
    "chat": (memory.chat, 1.0),
    "facts": (memory.facts, 1.0),
    "unknown": (memory.unknown, 0.4),
    "recall": (memory.code_word, 1.0),
    "arithmetic": (numbers.arithmetic, 2.0),
    "days": (numbers.days, 0.8),
    "units": (numbers.units, 0.8),
    "lists": (lists.lists, 2.5),
    "json": (forms.records, 1.0),
    "tools": (forms.calls, 1.0),
    "talk": (talk.talk, 0.4),
    "refusal": (talk.refusal, 0.4),
    "story": (talk.story, 0.7),
    "first": (first_exchanges.first, 1.5),
}
STAGE_ONE = tuple(task for task in TASKS if task != "first")  # what the first stage trains on
_TRIES = 6  # to find an episode that still fits
_ONCE = {"talk"}  # in a conversation, at its start
_NAMED = {"chat", "facts", "unknown"}
_SYSTEM = "system"  # the task of a system message: nothing is asked with it
_SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are Baton Tiny, a small demonstration model.",
    "You are a friendly assistant. Answer in one sentence.",
    "Be brief and polite.",
)
_SYSTEM_SHARE = 0.15  # of conversations, which begin with one of these
_TOOLS_SHARE = 0.2  # of conversations, whose tools some of its episodes call


def conversation(
    seed: int,
    *,
    held_out: bool,
    tokens: int,
    measure: Measure,
    tasks: Collection[str] = TASKS,
) -> Conversation:
    """A conversation of about `tokens` tokens by `measure`, and not more unless one episode
    alone is longer; its episodes are of `tasks`. The same arguments give the same
    conversation."""
    scene = _scene(seed, held_out)
    begin = _system(scene.choose)
    growing = _Growing(scene, tokens - measure(begin), measure, tasks)
    growing.say(_SYSTEM, begin)
    while growing.grow():
        pass
    return growing.finished()


def _system(choose: random.Random) -> tuple[Message, ...]:
    """A system message, or none."""
    if choose.random() >= _SYSTEM_SHARE:
        return ()
    return ({"role": "system", "content": choose.choice(_SYSTEM_TEXTS)},)


def of_task(seed: int, task: str, *, held_out: bool) -> Conversation:
    """A conversation of one episode of `task`."""
    scene = _scene(seed, held_out, tools=task == "tools")
    growing = _Growing(scene, 0, len)
    growing.add(TASKS[task][0](scene))
    return growing.finished()


def recall(
    seed: int,
    *,
    held_out: bool,
    distance: int,
    measure: Measure,
    tasks: Collection[str] = TASKS,
) -> Conversation:
    """A code word, other episodes of `distance` tokens or a little more, and its question."""
    scene = _scene(seed, held_out, tools=False)
    scene.take("code word", "talk")
    growing = _Growing(scene, distance, measure, tasks)
    code = memory.code_word(scene)
    growing.say("recall", code.parts[0])
    growing.fill(distance)
    growing.say("recall", code.parts[1])
    return growing.finished()


def _scene(seed: int, held_out: bool, tools: bool | None = None) -> Scene:
    choose = random.Random(f"{seed} {held_out}")
    scene = Scene(choose, held_out)
    if tools if tools is not None else choose.random() < _TOOLS_SHARE:
        forms.give_tools(scene)
    return scene


class _Growing:
    """A conversation under way, with the parts that are still to come."""

    def __init__(
        self, scene: Scene, tokens: int, measure: Measure, tasks: Collection[str] = TASKS
    ) -> None:
        self._scene = scene
        self._names = tuple(tasks)
        self._left = tokens
        self._measure = measure
        self._messages: list[Message] = []
        self._tasks: list[str] = []
        self._waiting: list[tuple[str, tuple[Message, ...]]] = []  # task and part

    def grow(self) -> bool:
        """One more episode, or the end (False) if none of a few fits or none is left."""
        for _ in range(_TRIES):
            if not any(self._weights()):
                return False
            episode = self._episode()
            tokens = sum(self._measure(part) for part in episode.parts)
            if tokens <= self._left or not self._begun():
                self._left -= tokens
                self.add(episode)
                return self._left > 0
        return False

    def fill(self, tokens: int) -> None:
        """Episodes of at least `tokens` tokens, complete."""
        said = 0
        while said < tokens:
            episode = self._episode()
            for part in episode.parts:
                self.say(episode.task, part)
                said += self._measure(part)

    def add(self, episode: Episode) -> None:
        """Its first part now; the others wait, and some that wait are said after it."""
        self.say(episode.task, episode.parts[0])
        self._waiting += [(episode.task, part) for part in episode.parts[1:]]
        while self._waiting and self._scene.choose.random() < 0.5:
            self._say_waiting()

    def say(self, task: str, part: tuple[Message, ...]) -> None:
        self._messages += part
        self._tasks += [task] * len(part)

    def _begun(self) -> bool:
        return any(task != _SYSTEM for task in self._tasks)

    def finished(self) -> Conversation:
        while self._waiting:
            self._say_waiting()
        return Conversation(
            tuple(self._messages),
            tuple(self._tasks),
            self._scene.tools,
            frozenset(self._scene.contents),
        )

    def _say_waiting(self) -> None:
        """One of those that wait, in any order."""
        at = self._scene.choose.randrange(len(self._waiting))
        task, part = self._waiting.pop(at)
        self.say(task, part)

    def _episode(self) -> Episode:
        name = self._scene.choose.choices(self._names, self._weights())[0]
        return TASKS[name][0](self._scene)

    def _weights(self) -> list[float]:
        return [self._weight(name) for name in self._names]

    def _weight(self, task: str) -> float:
        scene, weight = self._scene, TASKS[task][1]
        if task in _ONCE and self._begun():
            return 0.0
        if task == "recall" and "code word" in scene.taken:
            return 0.0
        if task == "tools":
            return 6.0 if scene.tools else 0.0
        if task in _NAMED and not memory.room_for_names(scene):
            return 0.0
        return weight
