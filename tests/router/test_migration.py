"""What a client gets of a request that is moved: the text, the logprobs and the end that it would
have had, nothing twice and nothing left out."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import tokenizers

from baton.proto import worker_pb2
from baton.runtime.config import RouterConfig
from tests.support.dispatch_scene import DispatchScene, output
from tests.support.json_values import JsonObject
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartRouter
from tests.support.scripted_worker import draw
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually

SAID = "the lazy dog and the cat sleeps in the warm sun"
STOP = "dog and"
both_ways = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
def tokenizer(model_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture
def config() -> RouterConfig:
    return replace(FAST_ROUTER, link_grace_s=0.05)


async def idle(running: RunningRouter) -> None:
    """Every worker is linked, and none holds a request."""
    workers = running.workers.values()
    await eventually(lambda: all(worker.seen("hello") for worker in workers))
    await eventually(lambda: not any(worker.held for worker in workers))


def pause(running: RunningRouter, at: int | None) -> None:
    for worker in running.workers.values():
        worker.pause_at = at


async def holders_die(running: RunningRouter, then_at: int | None) -> None:
    """The others go on, to the token at this index."""
    dying = [worker for worker in running.workers.values() if worker.held]
    assert dying
    for worker in running.workers.values():
        if worker not in dying:
            worker.pause_at = then_at
    for worker in dying:
        await worker.die()


def choices_of(reply: httpx.Response, stream: bool) -> list[JsonObject]:
    """Text, finish and logprobs of each choice; those of a stream are put together."""
    assert reply.status_code == 200, reply.text
    if not stream:
        return [
            {key: choice[key] for key in ("text", "finish_reason", "logprobs")}
            for choice in reply.json()["choices"]
        ]
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    found: dict[int, JsonObject] = {}
    for piece in [piece for line in lines for piece in json.loads(line)["choices"]]:
        whole = found.setdefault(
            piece["index"], {"text": "", "finish_reason": None, "logprobs": None}
        )
        assert whole["finish_reason"] is None  # nothing follows the end
        whole["text"] += piece["text"]
        whole["finish_reason"] = piece["finish_reason"]
        for key, values in (piece["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"].setdefault(key, []).extend(values)
    return [found[index] for index in sorted(found)]


@both_ways
async def test_a_stop_string_is_found_though_its_worker_died_within_it(
    router: StartRouter,
    arrived: list[int],
    tokenizer: tokenizers.Tokenizer,
    config: RouterConfig,
    stream: bool,
) -> None:
    tokens = tokenizer.encode(SAID, add_special_tokens=False).ids
    half = next(k for k in range(1, len(tokens)) if tokenizer.decode(tokens[:k]) == "the lazy dog")
    async with router(workers=("decode-0", "decode-1"), config=config) as running:
        for worker in running.workers.values():
            worker.says = [tokens]
        fields = {"stop": STOP, "max_tokens": 60, "stream": stream}
        undisturbed = await running.complete(**fields)
        assert choices_of(undisturbed, stream) == [
            {"text": "the lazy ", "finish_reason": "stop", "logprobs": None}
        ]
        await idle(running)
        arrived.clear()
        pause(running, half)
        asking = asyncio.create_task(running.complete(**fields))
        await eventually(lambda: len(arrived) == half)
        await holders_die(running, None)
        moved = await asking
        assert choices_of(moved, stream) == choices_of(undisturbed, stream)
        if not stream:
            assert moved.json()["usage"] == undisturbed.json()["usage"]
        (again,) = [
            submit
            for worker in running.workers.values()
            for submit in worker.seen("submit")
            if submit.attempt == 2
        ]
        assert list(again.choices[0].accepted) == tokens[:half]
        await eventually(lambda: not any(worker.held for worker in running.workers.values()))


@both_ways
async def test_three_migrations_change_neither_text_nor_logprobs(
    router: StartRouter, arrived: list[int], config: RouterConfig, stream: bool
) -> None:
    names = tuple(f"decode-{number}" for number in range(6))
    async with router(workers=names, config=config) as running:
        fields = {
            "n": 2,
            "seed": 4,
            "max_tokens": 20,
            "temperature": 0.8,
            "logprobs": 2,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.25,
            "repetition_penalty": 1.1,
        }
        undisturbed = choices_of(await running.complete(**fields), False)
        assert [len(choice["logprobs"]["tokens"]) for choice in undisturbed] == [20, 20]
        await idle(running)
        arrived.clear()
        pause(running, 4)
        asking = asyncio.create_task(running.complete(stream=stream, **fields))
        for here, then in ((4, 8), (8, 13), (13, None)):
            await eventually(lambda here=here: [arrived.count(c) for c in (0, 1)] == [here] * 2)
            await holders_die(running, then)
        assert choices_of(await asking, stream) == undisturbed
        submits = [s for worker in running.workers.values() for s in worker.seen("submit")]
        moved = [submit for submit in submits if submit.attempt > 1]
        assert sorted((s.request_id[-2:], s.attempt) for s in moved) == [
            (part, attempt) for part in (".0", ".1") for attempt in (2, 3, 4)
        ]
        for submit in moved:
            assert submit.sampling == submits[0].sampling and submit.prompt == submits[0].prompt
            assert len(submit.choices[0].accepted) == (4, 8, 13)[submit.attempt - 2]


@both_ways
async def test_a_sampled_request_without_a_seed_goes_on_as_it_began(
    router: StartRouter,
    arrived: list[int],
    tokenizer: tokenizers.Tokenizer,
    config: RouterConfig,
    stream: bool,
) -> None:
    async with router(workers=("decode-0", "decode-1"), config=config) as running:
        await idle(running)
        pause(running, 7)
        fields = {"temperature": 1.0, "max_tokens": 30, "stream": stream}
        asking = asyncio.create_task(running.complete(**fields))
        await eventually(lambda: len(arrived) == 7)
        await holders_die(running, None)
        (choice,) = choices_of(await asking, stream)
        first, second = sorted(
            (s for worker in running.workers.values() for s in worker.seen("submit")),
            key=lambda submit: submit.attempt,
        )
        assert first.sampling == second.sampling and first.sampling.temperature == 1.0
        tokens: list[int] = []
        for _ in range(30):
            before = [*first.prompt, *tokens]
            tokens.append(draw(before, first.sampling.seed, 0, running.vocabulary))
        assert list(second.choices[0].accepted) == tokens[:7]
        assert choice["text"] == tokenizer.decode(tokens) and choice["finish_reason"] == "length"
        await running.complete(temperature=1.0, max_tokens=1)
        other = [s for worker in running.workers.values() for s in worker.seen("submit")]
        assert len({submit.sampling.seed for submit in other}) == 2  # each its own


@on_virtual_time
async def test_what_was_accepted_is_confirmed_now_and_then() -> None:
    scene = DispatchScene()
    scene.dispatcher.confirm_weight = 10
    active_request = await scene.start(choices=2, max_tokens=100)
    for index in range(10):
        assert not scene.link().confirmed
        scene.give(output(index, 9), output(index, 9, choice=1))
    (accepted,) = scene.link().confirmed  # 10 tokens of each choice
    assert (accepted.request_id, accepted.attempt) == ("r", 1)
    assert [(entry.choice, entry.index) for entry in accepted.next] == [(0, 10), (1, 10)]
    await active_request.next()
    scene.give(output(10, 1, choice=1, end=worker_pb2.STOP))
    heavy = output(10, 9)
    for token in range(20):
        heavy.top.add(token=token, logprob=-1.0)
    scene.give(heavy)
    accepted = scene.link().confirmed[-1]
    assert [(entry.choice, entry.index) for entry in accepted.next] == [(0, 11)]
    scene.dispatcher.cancel(active_request)
