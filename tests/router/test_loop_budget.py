"""Pieces of work in turns of the loop: how many in one, which is next, which has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import pytest

from baton.proto import client_pb2
from baton.router.grpc_frontend.request import (
    detokenize_request,
    generate_request,
    tokenize_request,
)
from baton.router.requests.loop_budget import SHARE_S, LoopBudget
from baton.router.requests.prompt_limits import ContextLimits
from baton.router.requests.validator import Validator
from baton.router.templates.chat_template import ChatTemplate
from baton.simulation.fleet.byte_tokenizer import ByteTokenizer

P = ParamSpec("P")
T = TypeVar("T")


class Log:
    """What ran in which turn of the loop, on a clock that only work moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turn = 0
        self.ran: list[tuple[int, str]] = []
        self.turns = LoopBudget(lambda: self.now_s)
        asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self.turn += 1
        if self.turn < 200:
            asyncio.get_running_loop().call_soon(self._count)

    def piece(self, name: str, takes_s: float) -> Callable[[], str]:
        def work() -> str:
            self.ran.append((self.turn, name))
            self.now_s += takes_s
            return name

        return work

    def start(self, name: str, takes_s: float, size: int) -> asyncio.Task[str]:
        return asyncio.create_task(self.turns.run(size, self.piece(name, takes_s)))


async def test_little_work_is_done_at_once() -> None:
    log = Log()
    for name in "abc":  # no await between them lets another task run
        assert await log.turns.run(9, log.piece(name, SHARE_S / 4)) == name
    assert log.ran == [(0, "a"), (0, "b"), (0, "c")]


async def test_a_turn_has_one_large_piece_and_the_smallest_is_next() -> None:
    log = Log()
    sizes = {"first": 50, "large": 40, "begun": 0, "small": 10, "middle": 20}
    tasks = [log.start(name, 1.0, size) for name, size in sizes.items()]
    assert await asyncio.gather(*tasks) == [*sizes]
    assert [name for _, name in log.ran] == ["first", "begun", "small", "middle", "large"]
    turns = [turn for turn, _ in log.ran]
    assert len(set(turns)) == len(turns)


async def test_of_equal_ones_the_first_is_next() -> None:
    log = Log()
    await asyncio.gather(*(log.start(name, 1.0, 7) for name in "abcd"))
    assert "".join(name for _, name in log.ran) == "abcd"


async def test_a_turn_takes_no_more_after_its_share() -> None:
    log = Log()
    await asyncio.gather(*(log.start(str(n), SHARE_S / 2, 5) for n in range(20)))
    counts = [sum(turn == which for which, _ in log.ran) for turn, _ in log.ran]
    assert len(log.ran) == 20 and max(counts) <= 3


async def test_others_have_a_turn_between_two_pieces() -> None:
    log = Log()
    tasks = [log.start(str(n), 1.0, n) for n in range(30)]
    seen: list[int] = []
    while not all(task.done() for task in tasks):
        seen.append(len(log.ran))
        await asyncio.sleep(0)
    assert all(after - before <= 1 for before, after in zip(seen, seen[1:], strict=False))
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("granted", [False, True])
async def test_a_leaving_waiter_keeps_no_other_waiting(granted: bool) -> None:
    """Also one that leaves when its turn was given to it, and before it ran."""
    log = Log()
    first = log.start("first", 1.0, 0)
    leaver, stayer = log.start("leaver", 1.0, 1), log.start("stayer", 1.0, 2)
    await asyncio.sleep(0)  # the first has run, both others wait
    assert log.ran == [(1, "first")]
    if granted:
        log.turns.begin_turn()
    leaver.cancel()
    async with asyncio.timeout(5):
        assert await stayer == "stayer"
    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert await first == "first"
    assert [name for _, name in log.ran] == ["first", "stayer"]


async def test_what_fails_has_taken_its_time_too() -> None:
    log = Log()

    def fails() -> None:
        log.now_s += 1.0
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await log.turns.run(1, fails)
    begun = log.turn
    assert await log.turns.run(1, log.piece("next", 0.0)) == "next"
    assert log.ran[0][0] > begun


async def test_each_step_of_a_grpc_message_has_a_turn() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    validator = Validator("m", ByteTokenizer(), template, frozenset({7}), max_choices=4)
    steps: list[str] = []

    class Noting(LoopBudget):
        async def run(
            self, size: int, work: Callable[P, T], *given: P.args, **named: P.kwargs
        ) -> T:
            steps.append(work.__name__)
            return work(*given, **named)

    validator.turns = Noting()
    sent = client_pb2.GenerateRequest(
        model="m", messages=[client_pb2.Message(role="user", content="a")]
    )
    await generate_request(sent, validator, ContextLimits(max_context=50, vocab_size=200))
    await tokenize_request(client_pb2.TokenizeRequest(prompt="a"), validator.turns)
    await detokenize_request(client_pb2.DetokenizeRequest(), validator.turns)
    assert steps == [
        "_fields",
        "parse_fields",
        "chat_constraint",
        "plain",
        "plain_tools",
        "guard",
        "render",
        *["_fields", "parse_fields"] * 2,
    ]
