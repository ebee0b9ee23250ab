"""Batches: only answers count, rows fit their length, and a number gives the same batch again."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from baton.models.corpus import mix
from baton.models.embedded import embedded_model
from baton.models.training.batches import CONTEXT, FIRST_MESSAGES, Batches, gathered
from baton.models.training.tiny_tokenizer import ChatEncoder

TOKENIZER = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
ENCODER = ChatEncoder(TOKENIZER)


def batches(seed: int = 0) -> Batches:
    return Batches(ENCODER, 2048, seed)


def test_a_number_gives_the_same_batch_again() -> None:
    one, same = batches().batch(4, 0.2), batches().batch(4, 0.2)
    assert torch.equal(one.tokens, same.tokens) and torch.equal(one.targets, same.targets)
    for other in (batches().batch(5, 0.2), batches(seed=1).batch(4, 0.2)):
        assert other.tokens.shape != one.tokens.shape or not torch.equal(other.tokens, one.tokens)


@pytest.mark.parametrize("done", [0.0, 0.3, 0.55, 0.95])
def test_rows_hold_about_what_a_batch_should_and_little_padding(done: float) -> None:
    found = [batches().batch(number, done) for number in range(4)]
    read = sum(batch.read for batch in found)
    used = sum(int((batch.tokens > 0).sum()) for batch in found)
    assert 0.5 < read / (4 * 2048) <= 1.0
    assert used / read > 0.6
    assert max(batch.tokens.shape[1] for batch in found) <= CONTEXT


@pytest.mark.nightly
def test_sequences_grow_longer_as_training_comes_further() -> None:
    def longest(done: float) -> int:
        return max(batches().batch(number, done).tokens.shape[1] for number in range(25))

    assert longest(0.03) <= 96
    assert longest(0.3) <= 256
    assert longest(0.95) > 1024


@pytest.mark.nightly
def test_some_batches_are_of_what_is_slow_to_learn_alone() -> None:
    found = [batches().batch(number, 0.5) for number in range(40)]
    alone = [one for one in found if set(one.tasks) <= {"chat", "facts", "unknown", "tools"}]
    assert 4 < len(alone) < 25
    assert {one.tokens.shape for one in alone} == {(2048 // 256, 256)}
    answers = " ".join(TOKENIZER.decode(one.targets.tolist()) for one in alone)
    assert "lives in" in answers and "You have not told me about" in answers


@pytest.mark.nightly
def test_stage_one_has_no_first_messages_and_stage_two_many() -> None:
    found = [batches().batch(number, done) for number in range(20) for done in (0.3, 0.9)]
    assert not any("first" in one.tasks for one in found)
    second = Batches(ENCODER, 2048, 0, FIRST_MESSAGES)
    later = [second.batch(number, 0.1) for number in range(40)]
    alone = [one for one in later if set(one.tasks) == {"first"}]
    assert 6 < len(alone) < 24
    assert {one.tokens.shape for one in alone} == {(2048 // 96, 96)}
    assert max(one.tokens.shape[1] for one in later) == CONTEXT  # long ones are not forgotten
    assert {"recall", "lists", "talk"} <= {task for one in later for task in one.tasks}


@pytest.mark.nightly
def test_batches_of_one_length_have_one_shape() -> None:
    shapes = {batches().batch(number, done).tokens.shape for number in range(30) for done in (0, 1)}
    assert shapes <= {(2048 // length, length) for length in (96, 128, 256, 512, 1024, 2048)}


def test_what_counts_is_each_answer_with_its_end() -> None:
    chats = [
        ENCODER.encode(mix.of_task(seed, task, held_out=False))
        for seed, task in enumerate(mix.TASKS)
    ]
    batch = gathered(chats)
    said: dict[int, list[int]] = {}
    for row, column, target in zip(batch.rows, batch.columns, batch.targets, strict=True):
        assert int(batch.tokens[row, column + 1]) == int(target)
        said.setdefault(int(row), []).append(int(target))
    for row, chat in enumerate(chats):
        wanted = [token for _, start, end in chat.answers for token in chat.ids[start:end]]
        assert said[row] == wanted
        assert batch.tokens[row, : len(chat.ids)].tolist() == list(chat.ids)
        assert not batch.tokens[row, len(chat.ids) :].any()
    assert len(batch.tasks) == len(batch.targets)
    assert set(batch.tasks) == set(mix.TASKS)


def test_what_lies_beyond_the_context_is_cut_and_not_counted() -> None:
    talk = mix.recall(1, held_out=False, distance=2300, measure=ENCODER.measure)
    chat = ENCODER.encode(talk)
    assert len(chat.ids) > CONTEXT
    batch = gathered([chat])
    assert batch.tokens.shape == (1, CONTEXT)
    assert int(batch.columns.max()) < CONTEXT - 1
    assert len(batch.targets) < sum(end - start for _, start, end in chat.answers)
