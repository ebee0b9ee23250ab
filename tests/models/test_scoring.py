"""Scores: what counts as exact, valid, a right call and an accepted draft token."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer

from baton.models.embedded import embedded_model
from baton.models.evaluation.scoring import LONG_RECALL, Asked, acceptance, same_shape, score
from baton.models.training import tiny_tokenizer

TOKENIZER = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
END = tiny_tokenizer.SPECIAL_TOKENS.index("<|end|>")


def ids(text: str) -> tuple[int, ...]:
    return (*TOKENIZER.encode(text).ids, END)


def asked(task: str, answer: str) -> Asked:
    return Asked(task, (2, 3, 4), ids(answer))


def stepwise(answer: list[int], draft: list[int], proposed: int = 4) -> tuple[int, int]:
    """Speculation as it is run: the draft goes on from what is accepted, the model adds one."""
    said: list[int] = []
    taken = tried = 0
    while len(said) < len(answer):
        run: list[int] = []
        for _ in range(min(proposed, len(answer) - len(said))):
            end = len(said) + len(run)
            right_so_far = run == answer[len(said) : end]
            run.append(draft[end] if right_so_far else -1)
        tried += len(run)
        for token in run:
            if len(said) < len(answer) and token == answer[len(said)]:
                said.append(token)
                taken += 1
            else:
                break
        if len(said) < len(answer):
            said.append(answer[len(said)])
    return taken, tried


def test_acceptance_is_that_of_speculation_step_by_step() -> None:
    choose = random.Random(0)
    for _ in range(300):
        answer = [choose.randrange(4) for _ in range(choose.randint(1, 20))]
        draft = [token if choose.random() < 0.7 else 9 for token in answer]
        assert acceptance(answer, draft) == stepwise(answer, draft)


@pytest.mark.parametrize(
    ("answer", "draft", "found"),
    [
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], (4, 4)),  # four accepted, and the model's own fifth
        ([1, 2, 3], [1, 2, 3], (3, 3)),
        ([1, 2, 3], [9, 9, 9], (0, 3 + 2 + 1)),
        ([1, 2, 3, 4, 5, 6], [1, 9, 3, 4, 5, 6], (1 + 4, 4 + 4)),
    ],
)
def test_acceptance(answer: list[int], draft: list[int], found: tuple[int, int]) -> None:
    assert acceptance(answer, draft) == found


@pytest.mark.parametrize(
    ("got", "right"),
    [
        ('{"name": "Ada", "age": 7}', True),
        ('{"name": "Ben", "age": 8}', True),
        ('{"age": 8, "name": "Ben"}', True),
        ('{"name": "Ben"}', False),
        ('{"name": "Ben", "age": "8"}', False),
        ('{"name": "Ben", "age": 8, "city": "Rome"}', False),
        ('{"name": "Ben", "age": 8', False),
        ("[1]", False),
        ("Ben is 8", False),
    ],
)
def test_json_of_the_shape_asked_for(got: str, right: bool) -> None:
    assert same_shape('{"name": "Ada", "age": 7}', got) is right


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_figures() -> None:
    wanted = [
        asked("chat", "Ada lives in Rome."),
        asked("chat", "Ada lives in Oslo."),
        asked("json", '{"name": "Ada"}'),
        asked("json", '{"name": "Ben"}'),
        asked("tools", call("find", object="key", colour="red")),
        asked("tools", call("find", object="cup", colour="red")),
        asked("tools", "It is red."),
        asked(LONG_RECALL, "The code word is a-b-10."),
    ]
    said = [
        "Ada lives in Rome.",
        "Ada lives in Bern.",
        '{"name": "Eva"}',
        '{"name: "Ben"}',
        call("find", colour="red", object="key"),
        call("find", object="cup", colour="blue"),
        "It is red.",
        "The code word is a-b-10.",
    ]
    answers = [ids(text) for text in said]
    best = [(0, 0, *answer) for answer in answers]
    found = score(TOKENIZER, wanted, answers, best, 0.75)
    assert found.answers == {"chat": 2, "json": 2, "tools": 3, LONG_RECALL: 1}
    assert found.exact == {"chat": 1, "json": 0, "tools": 1, LONG_RECALL: 1}
    assert found.figures == {
        "exact_overall": 3 / 8,
        "recall_1500": 1.0,
        "json_valid": 0.5,
        "tool_call": 0.5,
        "acceptance_k4": 1.0,
        "first_messages": 0.75,
    }


def test_an_answer_that_does_not_end_is_not_exact() -> None:
    wanted = [
        asked("json", "{}"),
        asked("tools", call("x")),
        asked(LONG_RECALL, "a"),
        asked("chat", "Ada."),
    ]
    said = [*(one.answer for one in wanted[:3]), wanted[3].answer[:-1]]
    found = score(TOKENIZER, wanted, said, [(0, 0, *answer) for answer in said], 1.0)
    assert found.exact["chat"] == 0
    assert found.figures["exact_overall"] == 0.75
