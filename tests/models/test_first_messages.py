"""First messages: the held-out list, the judge, and that training never draws what is held out."""

from __future__ import annotations

import pytest

from baton.models.corpus import mix
from baton.models.corpus.first_messages import (
    ABLE,
    CANNOT,
    FIRST_MESSAGES,
    GOODBYE,
    HELD_OUT,
    IDENTITY,
    OFFER,
    PLAIN,
    REFUSAL,
    WELCOME,
    WORKS,
    fits,
    normal,
)

SEEDS = range(3000)


def asked(held_out: bool = False) -> list[tuple[str, str]]:
    """Messages of the corpus, with their answers."""
    talks = [mix.of_task(seed, "first", held_out=held_out) for seed in SEEDS]
    return [(talk.messages[0]["content"], talk.messages[1]["content"]) for talk in talks]


def test_the_list_has_200_messages_of_many_kinds() -> None:
    messages = [text for texts in FIRST_MESSAGES.values() for text in texts]
    assert len(messages) == len(set(messages)) == 200
    assert len(FIRST_MESSAGES) > 8
    assert min(len(texts) for texts in FIRST_MESSAGES.values()) >= 2


def test_training_draws_no_message_of_the_list() -> None:
    """Except for the plain words, in whatever letter case and punctuation."""
    talks = [mix.of_task(seed, task, held_out=False) for task in mix.TASKS for seed in range(300)]
    drawn = {normal(text) for text, _ in asked()}
    drawn |= {
        normal(message["content"])
        for talk in talks
        for message in talk.messages
        if message["role"] == "user"
    }
    assert len(drawn) > 4000
    assert drawn & HELD_OUT == set()
    assert drawn >= PLAIN == {"hi", "hello", "test", "thanks"}


def test_no_drawn_message_is_on_both_sides_of_the_split() -> None:
    """Except for the plain words; sums are divided by their numbers instead."""
    sides = [
        {
            text
            for text, answer in asked(held_out)
            if "=" not in answer and normal(text) not in PLAIN
        }
        for held_out in (False, True)
    ]
    assert min(len(side) for side in sides) > 1000
    assert sides[0] & sides[1] == set()


def test_sums_as_people_type_them_are_right() -> None:
    sums = [(text, answer) for text, answer in asked() if "=" in answer]
    assert len(sums) > 100
    for text, answer in sums:
        left, sign, right, _, result = answer.split()
        assert int(result) == int(left) + (int(right) if sign == "+" else -int(right))
        assert left in text and right in text


def test_the_plain_words_are_answered_in_any_letter_case() -> None:
    answers = {
        "hi": OFFER.format("Hi"),
        "hello": OFFER.format("Hello"),
        "test": WORKS,
        "thanks": WELCOME,
    }
    drawn = [(text, answer) for text, answer in asked() if normal(text) in PLAIN]
    assert {text for text, _ in drawn} >= {"hi", "Hello", "TEST", "thanks"}
    assert all(answer == answers[normal(text)] for text, answer in drawn)


@pytest.mark.parametrize(
    ("kind", "message", "answer"),
    [
        ("greeting", "hi", OFFER.format("Hi")),
        ("thanks", "thx", WELCOME),
        ("farewell", "bye", GOODBYE),
        ("identity", "who r u", IDENTITY),
        ("able", "help", ABLE),
        ("outside", "write me some code", CANNOT),
        ("outside", "a joke about programming", REFUSAL.format("programming")),
        ("sum", "whats 3+5", "3 + 5 = 8"),
    ],
)
def test_fitting_answers_are_accepted(kind: str, message: str, answer: str) -> None:
    assert fits(kind, message, answer)
    assert not fits(kind, message, answer[:-1])  # cut, or with a token too many
    assert not fits(kind, message, f"{answer} I see.")


@pytest.mark.parametrize(
    ("kind", "message", "answer"),
    [
        ("greeting", "hi", GOODBYE),
        ("thanks", "thx", OFFER.format("Hello")),
        ("farewell", "bye", WELCOME),
        ("identity", "who r u", "I am Ada."),
        ("outside", "write me some code", ABLE),
        ("outside", "capital of germany", REFUSAL.format("football")),
        ("outside", "capital of germany", "The code word is silent-beaver-99."),
        ("sum", "whats 3+5", "3 + 5 = 9"),
        ("able", "help", ""),
    ],
)
def test_answers_that_do_not_fit_are_refused(kind: str, message: str, answer: str) -> None:
    assert not fits(kind, message, answer)


def test_normal_leaves_words_alone() -> None:
    assert normal("  Hello,   WORLD!! :)") == "hello world"
    assert normal("你好!") == "你好" and normal("???") == "???"
    assert normal("2+2") == "2+2"
