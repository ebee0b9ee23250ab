"""Batches of conversations: rows of about one length, and which tokens the loss counts.

A batch depends on its number and on how far training has come, alone. Short conversations
first, long ones later: that is the curriculum. Some batches are of few tasks alone: of what is
slow to learn, which of several people a question is about, or of what is new in a second stage.
Only what the assistant says is learnt. Knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.models.corpus import mix
from baton.models.corpus.conversation import Conversation
from baton.models.training.tiny_tokenizer import ChatEncoder, Encoded

CONTEXT = 2048
_SEEDS = 1_000_000_000  # of single conversations, apart from batch numbers
_LONG = 512  # from here on, half of the rows are a code word with much between
_SLOW = ("chat", "facts", "unknown", "tools")  # seldom asked and late to be learnt in the mix
_SLOW_LENGTH = 256  # three people and the questions about them
_ALONE_FROM = 0.05  # of training
_ENDS = 40  # tokens that the code word's own messages take


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens` [rows, length], padded with 0; `rows`, `columns` [counted]: the places whose
    next token counts, and `targets` [counted] that next token."""

    tokens: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor
    tasks: tuple[str, ...]  # of each counted place

    @property
    def read(self) -> int:
        """Tokens computed, padding included."""
        return self.tokens.numel()


@dataclass(frozen=True, slots=True)
class Curriculum:
    """The order in which training meets its texts. `tasks` are those of the mix; `alone` holds
    tasks that have batches of their own, the share of such batches, and their rows' length in
    tokens. `begun` is how far the growth of the lengths has come when training begins, 0 to 1."""

    tasks: tuple[str, ...]
    alone: tuple[tuple[tuple[str, ...], float, int], ...]
    begun: float = 0.0


FROM_NOTHING = Curriculum(mix.STAGE_ONE, ((_SLOW, 0.3, _SLOW_LENGTH),))
FIRST_MESSAGES = Curriculum(
    tuple(mix.TASKS),
    ((("first",), 0.3, 96), (_SLOW, 0.3, _SLOW_LENGTH), (tuple(mix.TASKS), 0.15, CONTEXT)),
    begun=0.6,
)


class Batches:
    """`tokens` is about what a batch holds."""

    def __init__(
        self,
        encoder: ChatEncoder,
        tokens: int,
        seed: int,
        curriculum: Curriculum = FROM_NOTHING,
    ) -> None:
        self._encoder = encoder
        self._tokens = tokens
        self._seed = seed
        self._curriculum = curriculum

    def batch(self, number: int, done: float) -> Batch:
        """Batch `number`, for when the share `done` of training is over."""
        choose = random.Random(f"{self._seed} {number}")
        tasks, length = self._row(choose, done)
        count = max(1, self._tokens // length)
        return gathered([self._one(choose, length, tasks) for _ in range(count)], length)

    def _row(self, choose: random.Random, done: float) -> tuple[Sequence[str], int]:
        """The tasks and the length of this batch's rows."""
        plan = self._curriculum
        done = plan.begun + (1.0 - plan.begun) * done
        share = choose.random() if done >= _ALONE_FROM else 1.0
        for tasks, part, length in plan.alone:
            if share < part:
                return tasks, length
            share -= part
        return plan.tasks, _length(choose, done)

    def _one(self, choose: random.Random, length: int, tasks: Sequence[str]) -> Encoded:
        """A conversation that fits: rows of one length leave little padding to compute."""
        while True:
            found = self._encoder.encode(self._talk(choose, length, tasks))
            if len(found.ids) <= length:
                return found

    def _talk(self, choose: random.Random, length: int, tasks: Sequence[str]) -> Conversation:
        seed, measure = choose.randrange(_SEEDS), self._encoder.measure
        if length >= _LONG and choose.random() < 0.5:
            distance = int(choose.uniform(0.3, 0.9) * length) - _ENDS
            return mix.recall(seed, held_out=False, distance=distance, measure=measure, tasks=tasks)
        return mix.conversation(seed, held_out=False, tokens=length, measure=measure, tasks=tasks)


def _length(choose: random.Random, done: float) -> int:
    """Choose the length, in tokens, that all rows of a batch have."""
    if done < 0.1:
        return 96
    if done < 0.4:
        return choose.choice((96, 128, 160, 256))
    if done < 0.6:
        return choose.choice((96, 128, 128, 256, 512))
    return choose.choices((128, 256, 512, 1024, CONTEXT), (5, 3, 1, 1, 3))[0]


def gathered(chats: list[Encoded], length: int = 0) -> Batch:
    """Rows of `length`, or (0) as long as the longest, at most CONTEXT; what lies beyond is
    cut."""
    length = length or min(CONTEXT, max(len(chat.ids) for chat in chats))
    tokens = torch.zeros((len(chats), length), dtype=torch.int64)
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    tasks: list[str] = []
    for row, chat in enumerate(chats):
        ids = chat.ids[:length]
        tokens[row, : len(ids)] = torch.tensor(ids)
        for task, start, end in chat.answers:
            if end > length:
                continue
            rows += [row] * (end - start)
            columns += range(start - 1, end - 1)
            targets += ids[start:end]
            tasks += [task] * (end - start)
    counted = torch.tensor([rows, columns, targets])
    return Batch(tokens, counted[0], counted[1], counted[2], tuple(tasks))
