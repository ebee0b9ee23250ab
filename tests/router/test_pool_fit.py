"""Pools of unlike sizes: what fits where is counted as the workers count it."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context

from baton.decode_worker import credit
from baton.decode_worker.credit_queue import CreditQueue
from baton.decode_worker.sequences import Group, Request, Sequence
from baton.engine.scheduling.blocks import BlockPool
from baton.proto import worker_pb2
from baton.router.fleet.placement import FleetView, Placement, PlacementInput, open_groups
from baton.router.fleet.placement import place as place_on
from baton.router.fleet.radix_index import Holders
from baton.router.fleet.request_need import Need
from baton.router.fleet.roster import Roster
from baton.router.fleet.worker_view import KvFormat, WorkerCapacity, WorkerView
from baton.router.requests.openai_schema import ChatRequest, CompletionRequest
from baton.router.requests.prompt_limits import ContextLimits
from baton.router.requests.validator import Validator
from baton.router.templates.chat_template import ChatTemplate
from baton.runtime.config import StepConfig
from baton.runtime.errors import InvalidRequest, Overloaded, Unavailable
from baton.runtime.sampling import SamplingParams
from baton.simulation.fleet.byte_tokenizer import ByteTokenizer
from tests.support.dispatch_scene import DispatchScene
from tests.support.json_values import Json
from tests.support.virtual_time import on_virtual_time

SIZE = 4


def view(name: str, blocks: int, **fields: Any) -> WorkerView:
    shape = KvFormat("f", "float32", SIZE)
    made = WorkerView(name, name.encode(), name.split("-")[0], "h:1", shape, total_blocks=blocks)
    return replace(made, free_blocks=blocks, **fields)


def fleet_of(workers: list[WorkerView]) -> FleetView:
    roster = Roster()
    for worker in workers:
        roster.put(worker)
    return FleetView(roster)


def open_decoders(
    wanted: Need,
    workers: list[WorkerView],
    away: tuple[WorkerCapacity, ...] | list[WorkerCapacity] = (),
) -> list[WorkerView]:
    found = open_groups(wanted, fleet_of(workers), lambda: away)
    return [worker for worker in workers if any(worker.worker_id in kind.open for kind in found)]


def place(wanted: Need, workers: list[WorkerView]) -> Placement:
    fleet = fleet_of(workers)
    kinds = open_groups(wanted, fleet)
    given = PlacementInput(wanted, fleet, kinds, lambda shape: Holders(), "disaggregated")
    return place_on(given)


def taken_by_a_worker(
    blocks: int, prompt: int, max_tokens: int, accepted: int, choices: int, growth: int
) -> bool:
    """Whether a decode worker's own line lets it in."""
    request = Request(
        request_id="r",
        attempt=1,
        prompt=[0] * prompt,
        sampling=SamplingParams(),
        wire_sampling=worker_pb2.Sampling(),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        local=True,
        candidates=[],
        cache_salt=b"",
        root=b"",
        trace=Context(),
        arrived_s=0.0,
        arrived_wall_s=0.0,
        emit=lambda output: None,
    )
    request.sequences = [Sequence(request, n, [0] * accepted) for n in range(choices)]
    group = Group(request, request.sequences, [0] * (prompt + accepted), [], "placed")
    credit.promise(group, SIZE, growth)
    try:
        CreditQueue(BlockPool(blocks, SIZE), StepConfig()).append(group)
    except InvalidRequest:
        return False
    return True


def need(
    prompt: int, max_tokens: int, accepted: int = 0, choices: int = 1, growth: int = 128
) -> Need:
    left = max_tokens - accepted
    return Need(prompt + accepted, min(left, growth), prompt + max_tokens, sequences=choices)


@given(
    blocks=st.integers(1, 40),
    prompt=st.integers(1, 60),
    max_tokens=st.integers(1, 80),
    accepted=st.integers(0, 79),
    choices=st.integers(1, 8),
    growth=st.integers(1, 60),
)
def test_a_request_is_placed_only_where_its_worker_would_take_it(
    blocks: int, prompt: int, max_tokens: int, accepted: int, choices: int, growth: int
) -> None:
    accepted = min(accepted, max_tokens - 1) if choices == 1 else 0
    wanted = need(prompt, max_tokens, accepted, choices, growth)
    takes = taken_by_a_worker(blocks, prompt, max_tokens, accepted, choices, growth)
    with nullcontext() if takes else pytest.raises(InvalidRequest):
        open_decoders(wanted, [view("decode-0", blocks)])


SMALL, LARGE = view("decode-0", 8), view("decode-1", 64)


def decoders(wanted: Need, *workers: WorkerView) -> list[str]:
    return [worker.worker_id for worker in open_decoders(wanted, workers)]


@pytest.mark.parametrize(
    ("wanted", "where"),
    [
        (need(8, 24), ["decode-0", "decode-1"]),
        (need(8, 25), ["decode-1"]),  # the prompt would fit the small one
        (need(8, 8, choices=3), ["decode-0", "decode-1"]),  # 2 shared, 2 of each
        (need(9, 8, choices=3), ["decode-1"]),  # 3 of each beside 2 shared
        (need(8, 8, choices=4), ["decode-1"]),
    ],
)
def test_output_and_choices_count(wanted: Need, where: list[str]) -> None:
    assert decoders(wanted, SMALL, LARGE) == where


def test_what_the_worker_says_of_its_context_counts() -> None:
    short = replace(LARGE, max_context=30)
    assert decoders(need(8, 22), short) == ["decode-1"]
    with pytest.raises(InvalidRequest, match=r"largest KV pool \(30 tokens\)"):
        open_decoders(need(8, 23), [short])


def test_a_request_too_large_for_all_learns_what_to_lower() -> None:
    with pytest.raises(
        InvalidRequest, match=r"308 tokens of prompt and output.*256 tokens"
    ) as longest:
        open_decoders(need(8, 300), [SMALL, LARGE])
    assert longest.value.field == "max_tokens"
    with pytest.raises(InvalidRequest) as prompt:
        open_decoders(need(300, 8), [SMALL, LARGE])
    assert prompt.value.field == "prompt"
    with pytest.raises(InvalidRequest, match="of 8 choices of 108 tokens"):
        open_decoders(need(8, 100, choices=8), [SMALL, LARGE])


def test_a_full_or_absent_larger_pool_is_no_reason_to_say_never() -> None:
    wanted = need(8, 100)
    with pytest.raises(Overloaded):
        open_decoders(wanted, [SMALL, replace(LARGE, waiting=512)])
    with pytest.raises(Unavailable, match="large enough"):
        open_decoders(wanted, [SMALL, replace(LARGE, draining=True)])


def test_a_request_that_fits_only_a_disconnected_worker_is_valid() -> None:
    wanted, away = need(8, 100), [WorkerCapacity(SIZE, 27, 4096)]
    for none in ([], [WorkerCapacity(SIZE, 26, 4096)], [WorkerCapacity(SIZE, 27, 107)]):
        with pytest.raises(InvalidRequest):
            open_decoders(wanted, [SMALL], away=none)
    for some in (away, [WorkerCapacity()]):
        with pytest.raises(Unavailable, match="large enough takes work now"):
            open_decoders(wanted, [SMALL], away=some)
    assert open_decoders(wanted, [SMALL, LARGE], away=away) == [LARGE]
    with pytest.raises(InvalidRequest, match=r"\(108 tokens\)"):
        open_decoders(need(8, 101), [SMALL], away=away)


def test_a_prefill_worker_too_small_for_a_prompt_is_passed_over() -> None:
    tiny, short = view("prefill-0", 5), view("prefill-1", 64, max_context=20)
    roomy = view("prefill-2", 64)
    for wanted, names in (
        (need(20, 8), ["prefill-0", "prefill-1", "prefill-2"]),
        (need(21, 8), ["prefill-2"]),
    ):
        found = place(wanted, [LARGE, tiny, short, roomy])
        assert [worker.worker_id for worker in found.candidates] == names
    alone = place(need(21, 8), [LARGE, tiny, short])
    assert alone.local and not alone.candidates


def unlike(scene: DispatchScene) -> None:
    """decode-0 has 32 tokens of room, decode-1 has 1600."""
    sizes = {"decode-0": 2, "decode-1": 100}
    views = scene.fleet.views
    # the fleet of this scene alone shows other sizes
    scene.fleet.views = lambda: [  # type: ignore[method-assign]
        replace(each, total_blocks=sizes[each.worker_id]) for each in views()
    ]


@on_virtual_time
async def test_the_router_counts_them_and_a_small_worker_hears_nothing() -> None:
    scene = DispatchScene("decode-0", "decode-1")
    unlike(scene)
    await scene.start("long", max_tokens=30)
    assert not scene.link(0).submits() and len(scene.link(1).submits()) == 1
    with pytest.raises(InvalidRequest) as refused:
        await scene.start("longer", max_tokens=2000)
    assert refused.value.field == "max_tokens"
    await scene.dispatcher.close()


@on_virtual_time
async def test_a_new_request_waits_for_the_only_fitting_worker() -> None:
    scene = DispatchScene("decode-0", "decode-1")
    unlike(scene)
    large = scene.link(1)
    large.up = False
    with pytest.raises(InvalidRequest):  # no router knows of it
        await scene.start("long", max_tokens=30)
    scene.fleet.disconnected = [WorkerCapacity(16, 100, 4096)]
    with pytest.raises(Unavailable, match="large enough"):
        await scene.start("long", max_tokens=30)
    with pytest.raises(InvalidRequest):
        await scene.start("longer", max_tokens=2000)
    waiting = asyncio.create_task(scene.start("long", max_tokens=30))
    await asyncio.sleep(0.08)
    assert not waiting.done() and not scene.link(0).submits()
    large.up = True
    await waiting
    assert len(large.submits()) == 1
    await scene.dispatcher.close()


@on_virtual_time
async def test_a_request_that_lost_the_only_large_worker_waits_for_it() -> None:
    """It was let in, so it is not called too large where only smaller ones are left."""
    scene = DispatchScene("decode-0", "decode-1")
    unlike(scene)
    active_request = await scene.start(max_tokens=30)
    large = scene.link(1)
    for comes_back in (True, False):
        large.up = False
        large.sent.clear()
        scene.dispatcher.lost(large, None, "dead")
        await asyncio.sleep(0.08)
        assert not active_request.over and not scene.link(0).submits()
        if comes_back:
            large.up = True
            async with asyncio.timeout(2):
                while not large.submits():
                    await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="no worker that could hold this request"):
        async with asyncio.timeout(2):
            await active_request.next()
    await scene.dispatcher.close()


TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
VALIDATOR = Validator("m", ByteTokenizer(), TEMPLATE, frozenset({7}), max_choices=4)


async def length(limits: ContextLimits, **fields: Json) -> int:
    """Of the output of a completion of 20 tokens."""
    body = orjson.dumps({"model": "m", "prompt": [1] * 20, **fields})
    made = await VALIDATOR.completion(await VALIDATOR.parsed(body, CompletionRequest), limits)
    return made.max_tokens


async def test_a_request_with_a_token_limit_may_use_the_largest_pool() -> None:
    limits = ContextLimits(max_context=200, vocab_size=300, common_context=30)
    assert await length(limits, max_tokens=180) == 180
    with pytest.raises(InvalidRequest, match="room for 180"):
        await length(limits, max_tokens=181)


async def test_a_request_without_a_limit_stays_where_any_worker_fits() -> None:
    assert await length(ContextLimits(200, 300, common_context=30)) == 10
    assert await length(ContextLimits(200, 300, common_context=20)) == 16  # OpenAI's default
    assert await length(ContextLimits(30, 300)) == 10
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    chat = await VALIDATOR.parsed(body, ChatRequest)
    for common, total in ((100, 100), (1, 500)):
        made = await VALIDATOR.chat(chat, ContextLimits(500, 300, common_context=common))
        assert len(made.prompt) + made.max_tokens == total
