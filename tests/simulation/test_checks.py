"""The checks see what they are there for, and nothing where all is well."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.kv_transfer.memory_mover import Fate
from baton.router.answers.request_handler import Usage
from baton.simulation.fleet.client_view import TOKENIZER
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.history import FINISHED, LEFT, ROUTER_LOST, Ask, History
from baton.simulation.fleet.world import World
from baton.simulation.invariants import checks, rest
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop

PROMPT = tuple(range(11))


def history(
    how: str = FINISHED, took_s: float = 0.5, detail: str = "", **wishes: object
) -> History:
    """A request that was answered as it should be, and then ended so."""
    ask = Ask(router="r0", prompt=PROMPT, max_tokens=6, deadline_s=20.0)
    for name, value in wishes.items():
        object.__setattr__(ask, name, value)
    made = History(ask, 3, asked_s=1.0)
    for choice in range(ask.choices):
        drawn = ask.drawn(choice)[: ask.enough]
        made.tokens[choice] = [one.token for one in drawn]
        made.logprobs[choice] = [(one.logprob, one.top) for one in drawn]
        made.finishes[choice] = ["length"]
        made.text[choice] = TOKENIZER.decode(made.tokens[choice])
    made.usage = Usage(len(PROMPT), sum(map(len, made.tokens)), 0)
    made.end(how, 1.0 + took_s, detail)
    return made


def breaches(made: History, paused_s: float = 0.0, rate: float = 1.0, *, full: bool = False) -> str:
    return "\n".join(checks.of_history(made, checks.Excuse(paused_s, rate, full=full)))


@pytest.mark.parametrize(
    "wishes", [{}, {"choices": 3}, {"enough": 2}, {"temperature": 1.0}, {"top_logprobs": 0}]
)
def test_an_answer_as_it_should_be_is_no_breach(wishes: dict[str, object]) -> None:
    assert breaches(history(**wishes)) == ""


def test_a_request_ends_once() -> None:
    made = history()
    made.end(LEFT, 2.0)
    assert "ended 2 times" in breaches(made)
    made.ends.clear()
    assert "ended 0 times" in breaches(made)


def test_tokens_are_those_of_a_run_without_faults() -> None:
    for spoil in (lambda t: t[:-1] + [t[-1] + 1], lambda t: [t[0], *t], lambda t: t[1:]):
        made = history()
        made.tokens[0] = spoil(made.tokens[0])
        assert "expected" in breaches(made)
    cut_off = history(LEFT)
    cut_off.tokens[0] = cut_off.tokens[0][:3]
    cut_off.logprobs[0] = cut_off.logprobs[0][:3]
    assert breaches(cut_off) == ""
    cut_off.ends = [FINISHED]
    assert "3 tokens of 6" in breaches(cut_off)


def test_logprobs_equal_those_without_faults_if_requested() -> None:
    asked = history(top_logprobs=2)
    assert breaches(asked) == "" and len(asked.logprobs[0][0][1]) == 2
    (logprob, top), *others = asked.logprobs[0]
    assert logprob is not None and history().logprobs[0][0] == (None, ())
    for spoilt in ((None, top), (logprob, top[:1]), (logprob - 1, top)):
        asked.logprobs[0] = [spoilt, *others]
        assert "logprobs" in breaches(asked)
    unasked = history()
    unasked.logprobs[0][2] = (-0.5, ())
    assert "logprobs" in breaches(unasked)


def test_a_choice_finishes_once_and_as_it_did() -> None:
    twice = history()
    twice.finishes[0] = ["length", "length"]
    assert "finished with" in breaches(twice)
    stopped = history()
    stopped.finishes[0] = ["stop"]
    assert "finished with ['stop']" in breaches(stopped)
    token = history().ask.expected(0)[2]
    by_a_token = history(stops=(token,))
    by_a_token.finishes[0] = ["stop"]
    by_a_token.text[0] = by_a_token.text[0][:2]  # the token that stops is counted, and not shown
    assert len(by_a_token.tokens[0]) == 3 and breaches(by_a_token) == ""


def test_usage_counts_what_was_delivered() -> None:
    made = history()
    made.usage = Usage(len(PROMPT), 7, 0)
    assert (
        "usage was Usage(prompt=11, completion=7, cached=0, accepted=0, rejected=0) after 6 tokens"
        in breaches(made)
    )
    made.usage = Usage(len(PROMPT) + 1, 6, 0)
    assert "after 6 tokens" in breaches(made)
    made.usage = None
    assert "usage was None after 6 tokens" in breaches(made)
    unseen = history(choices=2)
    unseen.text[1] = unseen.text[1][:-1]
    assert "choice 1: 5 tokens shown of 6" in breaches(unseen)
    assert "after 11 tokens" in breaches(unseen)
    unseen.ends = [LEFT]
    assert breaches(unseen) == ""
    cut = history(enough=2)
    cut.usage = None  # what a stop string cuts off is counted
    assert breaches(cut) == ""


def test_deadlines_are_kept_and_not_before_their_time() -> None:
    assert breaches(history("DeadlineExceeded", took_s=1.0, deadline_s=1.0)) == ""
    late = history("DeadlineExceeded", took_s=1.02, deadline_s=1.0)
    assert "took 1.02 s of 1 s" in breaches(late)
    assert breaches(late, paused_s=0.02) == "" and breaches(late, rate=0.98) == ""
    assert "took 1.02 s" in breaches(late, paused_s=0.005)
    assert "took 1.02 s" in breaches(late, rate=0.995)
    slow = history("DeadlineExceeded", took_s=1.4, deadline_s=1.0, reads_s=0.2)
    assert breaches(slow) == ""
    early = breaches(history("DeadlineExceeded", took_s=0.5, deadline_s=1.0))
    assert "was ended after 0.50 s of 1 s" in early


@pytest.mark.parametrize(
    ("how", "wishes", "allowed"),
    [
        (LEFT, {}, True),
        (ROUTER_LOST, {}, True),
        ("Overloaded", {}, False),
        ("WorkerLost", {}, False),
        ("Unavailable", {}, False),
        ("EngineError", {}, False),
        ("InvalidRequest", {}, False),
        ("Cancelled", {}, False),
        ("Cancelled", {"reads_s": 0.2}, True),
    ],
)
def test_no_failure_of_the_fleet_is_an_excuse(
    how: str, wishes: dict[str, object], allowed: bool
) -> None:
    found = breaches(history(how, detail="for some reason", **wishes))
    assert (found == "") is allowed
    assert allowed or f"ended with {how}: for some reason" in found


def test_a_refusal_is_a_breach_unless_a_worker_is_full() -> None:
    refused = history("Overloaded", detail="4 wait here")
    assert "ended with Overloaded: 4 wait here" in breaches(refused)
    assert breaches(refused, full=True) == ""
    assert "WorkerLost" in breaches(history("WorkerLost"), full=True)


def test_a_request_with_much_time_gets_an_answer() -> None:
    patient = history("DeadlineExceeded", took_s=20.0)
    assert "ended with DeadlineExceeded" in breaches(patient)


@pytest.mark.parametrize("stuck", [True, False])
def test_a_fleet_is_not_quiet_while_a_read_is_in_flight(stuck: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = World(loop, draw(0).config, random.Random(1))
        world.exchange.bytes_per_s = 10 * world.kind.block_bytes(draw(0).config.pool.block_size)
        one = world.start_worker("p0", "prefill", 16)
        other = world.start_worker("d0", "decode", 16)
        await other.mover.connect(one.mover.describe())
        assert rest.restless(world) == []
        world.exchange.decide = lambda _: Fate(0.1, stuck=stuck)
        for block in range(2):  # the second waits for its turn, unless both are stuck
            other.mover.read(one.boot_id, [block], [block])
        stuck_ones = 2 if stuck else 0
        words = f"2 READs are in flight, {stuck_ones} of them stuck"
        assert rest.restless(world) == [words]
        await asyncio.sleep(0.15)
        assert rest.restless(world) == [words]
        world.exchange.release_stuck()
        await asyncio.sleep(0.2)
        assert rest.restless(world) == []

    virtual_loop.run(main())


def test_a_fleet_is_not_quiet_while_a_router_believes_in_a_line() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = World(loop, draw(0).config, random.Random(1))
        world.start_worker("p0", "prefill", 16)
        world.start_worker("d0", "decode", 16)
        fleet = world.start_router("r0").fleet
        await asyncio.sleep(1)
        assert rest.restless(world) == []
        link = fleet.link("d0")
        assert link is not None
        link.load.waiting = 2
        assert rest.restless(world) == ["r0: believes 2 requests wait at d0"]
        await asyncio.sleep(1)  # the worker's next word is the truth
        assert rest.restless(world) == []

    virtual_loop.run(main())
