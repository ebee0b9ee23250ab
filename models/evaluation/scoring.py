"""Turns answers into figures: what is counted, and how much is wanted.

The figures are explained in `baton.models.evaluation.evaluate`. Knows no model; keeps no state.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from baton.models.training.tiny_tokenizer import CALL, CALL_END

LIMITS = {
    "exact_overall": 0.95,
    "recall_1500": 0.95,
    "json_valid": 0.98,
    "tool_call": 0.95,
    "acceptance_k4": 0.6,
    "first_messages": 0.95,
}
RECALL_TOKENS = 1500
PROPOSED = 4
LONG_RECALL = f"recall {RECALL_TOKENS}"  # the task's name


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and its right answer, as token ids; the end token is the answer's last."""

    task: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """`answers` and how many are `exact`, by task; `figures` by the names of LIMITS."""

    answers: dict[str, int]
    exact: dict[str, int]
    figures: dict[str, float]


def score(
    tokenizer: Tokenizer,
    asked: Sequence[Asked],
    said: Sequence[Sequence[int]],
    best: Sequence[Sequence[int]],
    fitting: float,
) -> Score:
    """`said` are the answers; `best` are the draft's likeliest next tokens after each token of
    prompt and answer; `fitting` is the share of first messages that got a fitting answer."""
    answers: dict[str, int] = defaultdict(int)
    exact: dict[str, int] = defaultdict(int)
    valid: list[bool] = []
    calls: list[bool] = []
    accepted = proposed = 0
    for one, answer, draft in zip(asked, said, best, strict=True):
        answers[one.task] += 1
        exact[one.task] += tuple(answer) == one.answer
        wanted, got = tokenizer.decode(one.answer), tokenizer.decode(answer)
        if one.task == "json":
            valid.append(same_shape(wanted, got))
        if wanted.startswith(CALL):
            calls.append(_call(wanted) == _call(got))
        taken, tried = acceptance(answer, draft[len(one.prompt) - 1 :])
        accepted, proposed = accepted + taken, proposed + tried
    figures = {
        "exact_overall": sum(exact.values()) / sum(answers.values()),
        "recall_1500": exact[LONG_RECALL] / answers[LONG_RECALL],
        "json_valid": sum(valid) / len(valid),
        "tool_call": sum(calls) / len(calls),
        "acceptance_k4": accepted / proposed,
        "first_messages": fitting,
    }
    return Score(dict(answers), dict(exact), figures)


def acceptance(answer: Sequence[int], draft: Sequence[int]) -> tuple[int, int]:
    """Accepted and proposed tokens when `answer` is said with a draft's help. `draft[n]` is what
    the draft says after n tokens of the answer: as long as it is right, its own proposals."""
    accepted = proposed = at = 0
    while at < len(answer):
        tried = min(PROPOSED, len(answer) - at)
        right = 0
        while right < tried and draft[at + right] == answer[at + right]:
            right += 1
        accepted, proposed = accepted + right, proposed + tried
        at += right + 1  # the model's own token after the last right one
    return accepted, proposed


def same_shape(wanted: str, got: str) -> bool:
    """Whether `got` is a JSON object with the keys and the kinds of value that `wanted` has."""
    try:
        found = json.loads(got)
    except ValueError:
        return False
    return isinstance(found, dict) and _kinds(found) == _kinds(json.loads(wanted))


def _kinds(content: dict[str, object]) -> dict[str, type]:
    return {key: type(value) for key, value in content.items()}


def _call(text: str) -> Any:
    """The called function and its arguments; the text itself if it is no call."""
    if not (text.startswith(CALL) and text.endswith(CALL_END)):
        return text
    try:
        return json.loads(text[len(CALL) : -len(CALL_END)])
    except ValueError:
        return text
