"""Measure how quantisation changes the answers of the trained model of the package.

    python -m benchmarks.quantized_answers [--each N] [--seed N] [--threads N] [--quick]
                                           [--json FILE]

Held-out questions of every task (`baton.models.evaluation.evaluate`), greedily, through
the engine: in bfloat16, and again with quantised weights or KV. float32 stands beside them: it
shows how many answers change by rounding alone.

exact_X           answers that are the right ones, token for token
changed_X         complete answers that differ from those in bfloat16, in any token
changed_unsure_X  the same where the last question's tokens are shuffled, so that no answer is
                  right and the likeliest tokens are close; up to 48 tokens are drawn
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from baton.models.embedded import embedded_model
from baton.models.evaluation.answering import ModelAnswers
from baton.models.evaluation.evaluate import questions
from baton.models.evaluation.scoring import Asked
from baton.models.training.tiny_tokenizer import END, SPECIAL_TOKENS, ChatEncoder
from benchmarks.figures.report import Figure, parser, report

UNSURE_TOKENS = 48
ROOM_TOKENS = 16  # more than the right answer has, before a wrong one is cut
BASE = "bf16"
FORMS = {
    BASE: {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "kv_int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "kv_fp8_e4m3": {"dtype": "bfloat16", "kv_dtype": "fp8_e4m3"},
}


@dataclass(frozen=True, slots=True)
class Said:
    """The answers of one form, in the order of the questions."""

    sure: list[list[int]]
    unsure: list[list[int]]


def answers(form: str, asked: Sequence[Asked], shuffled: Sequence[Sequence[int]]) -> Said:
    """Answers to the questions as they are, and to the prompts that were shuffled."""
    most = [len(one.answer) + ROOM_TOKENS for one in asked]
    given = FORMS[form]
    model = ModelAnswers(
        embedded_model(),
        dtype=given.get("dtype", "auto"),
        quantization=given.get("quantization", "none"),
        kv_dtype=given.get("kv_dtype", "auto"),
    )
    sure = model.greedy([one.prompt for one in asked], most)
    return Said(sure, model.greedy(shuffled, [UNSURE_TOKENS] * len(shuffled)))


def shuffled_question(prompt: Sequence[int], user: int, end: int, seed: int) -> tuple[int, ...]:
    """`prompt` with the tokens of its last user message, between the tokens `user` and `end`,
    in a random order."""
    ids = list(prompt)
    first = len(ids) - ids[::-1].index(user)
    last = ids.index(end, first)
    ids[first:last] = random.Random(seed).sample(ids[first:last], last - first)
    return tuple(ids)


def figures(asked: Sequence[Asked], said: dict[str, Said]) -> list[Figure]:
    """Shares of `asked`, by form."""
    count, base = len(asked), said[BASE]
    right = [list(one.answer) for one in asked]
    made = [Figure(f"exact_{name}", _alike(one.sure, right) / count) for name, one in said.items()]
    others = {name: one for name, one in said.items() if name != BASE}
    made += [
        Figure(f"changed_{name}", 1 - _alike(one.sure, base.sure) / count)
        for name, one in others.items()
    ]
    made += [
        Figure(f"changed_unsure_{name}", 1 - _alike(one.unsure, base.unsure) / count)
        for name, one in others.items()
    ]
    return [*made, Figure("answers", count)]


def _alike(some: Sequence[list[int]], others: Sequence[list[int]]) -> int:
    return sum(mine == theirs for mine, theirs in zip(some, others, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser("What quantisation changes in the answers of a trained model")
    made.add_argument("--each", type=int, default=20, help="conversations of each task")
    made.add_argument("--seed", type=int, default=1_000_000)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--quick", action="store_true", help="eight questions, two forms")
    options = made.parse_args(arguments)
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    asked = questions(ChatEncoder(tokenizer), 1 if options.quick else options.each, options.seed)
    asked = asked[:8] if options.quick else asked
    forms = (BASE, "int4") if options.quick else tuple(FORMS)
    user, end = (SPECIAL_TOKENS.index(name) for name in ("<|user|>", END))
    shuffled = [
        shuffled_question(one.prompt, user, end, options.seed + number)
        for number, one in enumerate(asked)
    ]
    said = {form: answers(form, asked, shuffled) for form in forms}
    report(figures(asked, said), options.json)


if __name__ == "__main__":
    main()
