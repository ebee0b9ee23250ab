"""How good the trained models are, on held-out conversations and through the engine.

    python -m baton.models.evaluation.evaluate [--folder FOLDER] [--each N] [--seed N]
        [--json FILE] [--card]

FOLDER holds baton-tiny and baton-tiny-draft. Every answer of a conversation is asked for on its
own, after the right ones before it, greedily. Nothing that is asked was trained on
(`baton.models.corpus.conversation`).

exact_overall   answers that are the right ones, token for token, over all tasks: N conversations
                of each task, N of many tasks in up to 600 tokens, and those of recall_1500
recall_1500     code words said rightly, 1,500 tokens or more after they were given
json_valid      answers as JSON that parse and have the keys and kinds of value asked for
tool_call       calls that name the right tool and have the right arguments
acceptance_k4   of the draft model's tokens, four proposed at a time, the share that equals what
                baton-tiny says, greedily; a proposal counts up to the answer's end
first_messages  of 200 messages as people type them first, which no training draws, the share
                that gets a fitting sentence (`baton.models.corpus.first_messages`)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tokenizers import Tokenizer

from baton.models.corpus import mix
from baton.models.corpus.conversation import Conversation, turns
from baton.models.corpus.first_messages import FIRST_MESSAGES, fits
from baton.models.evaluation.answering import ModelAnswers
from baton.models.evaluation.model_card import write_cards
from baton.models.evaluation.scoring import LIMITS, LONG_RECALL, RECALL_TOKENS, Asked, Score, score
from baton.models.training.tiny_tokenizer import ChatEncoder, Encoded

_MIXED_TOKENS = (150, 300, 600)
_FIRST_ANSWER_TOKENS = 64
_ROOM = 16  # tokens more than the right answer has, before a wrong one is cut


def questions(encoder: ChatEncoder, each: int, seed: int) -> list[Asked]:
    """`each` held-out conversations of every kind, all of their answers. The order is fixed."""
    found: list[Asked] = []
    for task in mix.TASKS:
        for number in range(each):
            talk = mix.of_task(seed + number, task, held_out=True)
            found += _asked(encoder.encode(talk))
    for number in range(each):
        talk = mix.conversation(
            seed + number,
            held_out=True,
            tokens=_MIXED_TOKENS[number % len(_MIXED_TOKENS)],
            measure=encoder.measure,
        )
        found += _asked(encoder.encode(talk))
    for number in range(each):
        talk = mix.recall(
            seed + number, held_out=True, distance=RECALL_TOKENS, measure=encoder.measure
        )
        *_, last = _asked(encoder.encode(talk))
        found.append(Asked(LONG_RECALL, last.prompt, last.answer))
    return found


def _asked(chat: Encoded) -> Iterator[Asked]:
    for task, start, end in chat.answers:
        yield Asked(task, chat.ids[:start], chat.ids[start:end])


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """A model's answer to a message of FIRST_MESSAGES, and whether it fits."""

    message: str
    answer: str
    fitting: bool


def first_answers(
    answering: ModelAnswers,
    tokenizer: Tokenizer,
    messages: Mapping[str, Sequence[str]] = FIRST_MESSAGES,
) -> list[FirstAnswer]:
    """The answer to each of `messages`, by their kind, each at the start of a conversation."""
    asked = [(kind, text) for kind, texts in messages.items() for text in texts]
    prompts = [_prompt(ChatEncoder(tokenizer), text) for _, text in asked]
    said = answering.greedy(prompts, [_FIRST_ANSWER_TOKENS] * len(prompts))
    answers = [tokenizer.decode(answer) for answer in said]
    return [
        FirstAnswer(text, answer, fits(kind, text, answer))
        for (kind, text), answer in zip(asked, answers, strict=True)
    ]


def _prompt(encoder: ChatEncoder, text: str) -> tuple[int, ...]:
    chat = encoder.encode(Conversation(turns((text, "")), ("first",) * 2, (), frozenset()))
    ((_, start, _),) = chat.answers
    return chat.ids[:start]


def evaluate(folder: Path, each: int, seed: int) -> tuple[Score, list[FirstAnswer]]:
    """Ask both models of `folder`. Raises ModelError if one cannot be loaded."""
    tokenizer = Tokenizer.from_file(str(folder / "baton-tiny" / "tokenizer.json"))
    asked = questions(ChatEncoder(tokenizer), each, seed)
    model = ModelAnswers(folder / "baton-tiny")
    said = _answers(model, asked)
    first = first_answers(model, tokenizer)
    draft = ModelAnswers(folder / "baton-tiny-draft")
    best = draft.best([(*one.prompt, *answer) for one, answer in zip(asked, said, strict=True)])
    fitting = sum(one.fitting for one in first) / len(first)
    return score(tokenizer, asked, said, best, fitting), first


def _answers(answering: ModelAnswers, asked: Sequence[Asked]) -> list[list[int]]:
    most = [len(one.answer) + _ROOM for one in asked]
    return answering.greedy([one.prompt for one in asked], most)


def show(score: Score, first: Sequence[FirstAnswer], console: Console) -> None:
    """A table of tasks, one of figures with their limits, and the answers that do not fit."""
    tasks = Table("task", "answers", "exact")
    for task, count in score.answers.items():
        tasks.add_row(task, str(count), f"{score.exact[task] / count:.3f}")
    figures = Table("figure", "measured", "wanted")
    for name, value in score.figures.items():
        figures.add_row(name, f"{value:.3f}", f">= {LIMITS[name]}")
    unfitting = Table("first message", "answer that does not fit")
    for one in first:
        if not one.fitting:
            unfitting.add_row(escape(one.message), escape(one.answer))
    for table in (tasks, figures, unfitting):
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description="Evaluate the trained models, held out")
    made.add_argument("--folder", type=Path, default=Path(__file__).parent.parent,
                      help="of both models (those that come with the package)")  # fmt: skip
    made.add_argument("--each", type=int, default=60, help="conversations of each task")
    made.add_argument("--seed", type=int, default=1_000_000)
    made.add_argument("--json", type=Path)
    made.add_argument("--card", action="store_true", help="write README.md into both folders")
    options = made.parse_args(arguments)
    found, first = evaluate(options.folder, options.each, options.seed)
    show(found, first, Console())
    if options.card:
        write_cards(options.folder, found)
    if options.json is not None:
        tasks = {name: found.exact[name] / count for name, count in found.answers.items()}
        content = {**found.figures, "exact_by_task": tasks, "answers": found.answers}
        options.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
