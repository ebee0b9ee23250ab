"""Chats of several turns over simulated workers: hardly anything is computed twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.fleets.chat_replay import BLOCK_TOKENS, ChatReplay
from benchmarks.inputs.chats import Chat, Turn, from_trace, least_tokens, synthetic

MOST = 1.03  # computed tokens over the least possible
TRACES = Path(
    os.environ.get("BATON_TRACES", Path(__file__).resolve().parents[2].parent / "shared" / "traces")
)
MOONCAKE = TRACES / "mooncake" / "conversation_trace.jsonl"


@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_chats_compute_hardly_more_than_the_least(seed: int) -> None:
    chats = synthetic(80, seed)
    least = least_tokens(chats)
    counts = ChatReplay(chats, 4, 4).run()
    assert counts.turns == sum(len(chat.turns) for chat in chats)
    assert least <= counts.computed <= MOST * least
    assert counts.read > 0.1 * least


def test_answers_are_computed_again_without_reads() -> None:
    chats = synthetic(80)
    counts = ChatReplay(chats, 4, 4).run(read_cached=False)
    assert counts.read == 0 and counts.computed > 1.1 * least_tokens(chats)


@pytest.mark.skipif(not MOONCAKE.exists(), reason=f"{MOONCAKE} is not there: set BATON_TRACES")
def test_two_thousand_chats_of_the_mooncake_trace() -> None:
    chats = from_trace(MOONCAKE, 2000)
    assert all(2 <= len(chat.turns) <= 8 for chat in chats)
    counts = ChatReplay(chats, 4, 4).run()
    assert counts.computed <= MOST * least_tokens(chats)


def test_least_tokens_are_those_that_nothing_had() -> None:
    """A common beginning of one hashed block, an answer that the next prompt confirms."""
    first = Turn(0.0, 600, 100, (1, 2))
    second = Turn(9.0, 720, 10, (1, 3))  # 699 tokens are known: the last of the answer is not
    other = Turn(5.0, 530, 10, (1, 4))
    assert least_tokens([Chat([first, second]), Chat([other])]) == 600 + 18 + 21


def test_answers_have_the_identities_of_the_next_prompt() -> None:
    chat = Chat([Turn(0.0, 600, 100, (1, 2)), Turn(9.0, 650, 10, (1, 3))])
    confirmed = 650 // BLOCK_TOKENS
    answered = chat.identities(0, 699, BLOCK_TOKENS, chat=7)
    following = chat.identities(1, 650, BLOCK_TOKENS, chat=7)
    assert len(answered) == 699 // BLOCK_TOKENS and answered[:confirmed] == following
    assert not set(answered[confirmed:]) & set(chat.identities(1, 659, BLOCK_TOKENS, chat=7))
