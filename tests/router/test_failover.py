"""Workers die, fall silent, come back, lie and refuse: the client sees the same tokens, or a
clear end."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from tests.support.json_values import Json
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartRouter
from tests.support.scripted_worker import ScriptedWorker
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

WORKERS = ("decode-0", "decode-1")


def text_of(body: str) -> tuple[str, str | None]:
    lines = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line) for line in lines[:-1]]
    found = [event["choices"][0] for event in choices if event.get("choices")]
    return "".join(choice["text"] for choice in found), found[-1]["finish_reason"]


def bearer(running: RunningRouter) -> ScriptedWorker:
    """The worker that holds a request now."""
    (worker,) = [worker for worker in running.workers.values() if worker.held]
    return worker


async def reference(running: RunningRouter, **fields: Json) -> str:
    """The undisturbed text; afterwards no worker holds anything."""
    reply = await running.complete(**fields)
    await eventually(lambda: not any(worker.held for worker in running.workers.values()))
    text: str = reply.json()["choices"][0]["text"]
    return text


async def both_linked(running: RunningRouter) -> None:
    await eventually(lambda: all(w.seen("hello") for w in running.workers.values()))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pause_at", [0, 1, 7])
async def test_death_mid_stream_continues_identically(
    router: StartRouter, arrived: list[int], pause_at: int, stream: bool
) -> None:
    async with router(workers=WORKERS) as running:
        await both_linked(running)
        whole = await reference(running, seed=9, max_tokens=30)
        arrived.clear()
        for worker in running.workers.values():
            worker.pause_at = pause_at
        asking = asyncio.create_task(running.complete(seed=9, max_tokens=30, stream=stream))
        await eventually(lambda: any(worker.held for worker in running.workers.values()))
        dying = bearer(running)
        await eventually(lambda: len(arrived) == pause_at)
        for worker in running.workers.values():
            worker.pause_at = None if worker is not dying else worker.pause_at
        await dying.die()
        reply = await asking
        if stream:
            assert text_of(reply.text) == (whole, "length")
        else:
            assert reply.json()["choices"][0]["text"] == whole
            assert reply.json()["usage"]["completion_tokens"] == 30
        (survivor,) = [worker for worker in running.workers.values() if worker is not dying]
        again = survivor.seen("submit")[-1]
        assert again.attempt == 2
        assert len(again.choices[0].accepted) == pause_at
        assert again.max_tokens == 30


async def test_restart_alone_is_waited_for(router: StartRouter) -> None:
    async with router() as running:
        worker = running.workers["decode-0"]
        whole = await reference(running, seed=2, max_tokens=25)
        worker.pause_at = 5
        asking = asyncio.create_task(running.complete(seed=2, max_tokens=25, stream=True))
        await eventually(lambda: worker.held and bool(next(iter(worker.held.values())).outputs))
        await worker.die()
        worker.pause_at = None
        await worker.start()
        assert text_of((await asking).text) == (whole, "length")


async def test_choices_continue_one_by_one(router: StartRouter) -> None:
    async with router(workers=WORKERS) as running:
        await both_linked(running)
        whole = (await running.complete(seed=4, max_tokens=20, n=3)).json()["choices"]
        await eventually(lambda: not any(worker.held for worker in running.workers.values()))
        for worker in running.workers.values():
            worker.pause_at = 6
        asking = asyncio.create_task(running.complete(seed=4, max_tokens=20, n=3))
        await eventually(lambda: any(worker.held for worker in running.workers.values()))
        dying = bearer(running)
        await eventually(lambda: len(next(iter(dying.held.values())).outputs) == 18)
        for worker in running.workers.values():
            worker.pause_at = None if worker is not dying else 6
        await dying.die()
        assert (await asking).json()["choices"] == whole
        (survivor,) = [worker for worker in running.workers.values() if worker is not dying]
        again = [submit for submit in survivor.seen("submit") if submit.attempt == 2]
        assert sorted(submit.request_id[-2:] for submit in again) == [".0", ".1", ".2"]
        assert [[c.choice for c in submit.choices] for submit in again] == [[0], [1], [2]]


async def test_broken_link_resumes_on_the_same_worker(router: StartRouter) -> None:
    async with router(config=replace(FAST_ROUTER, link_grace_s=30.0)) as running:
        worker = running.workers["decode-0"]
        whole = await reference(running, seed=8, max_tokens=60)
        worker.step_s = 0.01
        asking = asyncio.create_task(running.complete(seed=8, max_tokens=60, stream=True))
        await eventually(
            lambda: bool(worker.held) and len(next(iter(worker.held.values())).outputs) > 5
        )
        worker.break_links()
        assert text_of((await asking).text) == (whole, "length")
        assert [submit.attempt for submit in worker.seen("submit")] == [1, 1]
        resumed = worker.seen("hello")[-1].resume
        assert len(resumed) == 1 and resumed[0].next[0].index > 0


async def test_silence_ends_a_link(router: StartRouter) -> None:
    config = replace(FAST_ROUTER, link_silence_s=0.4, link_grace_s=0.2)
    async with router(workers=WORKERS, config=config) as running:
        await both_linked(running)
        whole = await reference(running, seed=6, max_tokens=15)
        for worker in running.workers.values():
            worker.pause_at = 3
        asking = asyncio.create_task(running.complete(seed=6, max_tokens=15))
        await eventually(lambda: any(worker.held for worker in running.workers.values()))
        stopped = bearer(running)
        stopped.silent = True
        for worker in running.workers.values():
            worker.pause_at = None if worker is not stopped else 3
        assert (await asking).json()["choices"][0]["text"] == whole


async def test_stale_outputs_change_nothing(router: StartRouter) -> None:
    async with router() as running:
        whole = await reference(running, seed=8, max_tokens=40)
        running.workers["decode-0"].echo_stale = True
        assert await reference(running, seed=8, max_tokens=40) == whole


async def test_missing_output_is_never_skipped(router: StartRouter) -> None:
    async with router() as running:
        whole = await reference(running, seed=8, max_tokens=20)
        worker = running.workers["decode-0"]
        worker.skip_index = 5
        assert await reference(running, seed=8, max_tokens=20) == whole
        again = worker.seen("submit")[-1]
        assert again.attempt == 2 and len(again.choices[0].accepted) == 5


async def test_a_failure_ends_an_attempt_whatever_its_index(router: StartRouter) -> None:
    async with router() as running:
        whole = await reference(running, seed=8, max_tokens=20)
        worker = running.workers["decode-0"]
        worker.fail_at, worker.fail_index = {7: ("OutOfBlocks", True)}, 0
        assert await reference(running, seed=8, max_tokens=20) == whole


async def test_a_busy_worker_is_asked_again_for_a_request_under_way(router: StartRouter) -> None:
    async with router() as running:
        whole = await reference(running, seed=8, max_tokens=20)
        worker = running.workers["decode-0"]
        worker.fail_at = {3: ("Overloaded", True), 4: ("Overloaded", True)}
        assert await reference(running, seed=8, max_tokens=20) == whole
        assert worker.seen("submit")[-1].attempt == 3


@pytest.mark.parametrize("at", [0, 3])
async def test_retryable_failure_is_tried_again(router: StartRouter, at: int) -> None:
    async with router() as running:
        whole = await reference(running, seed=8, max_tokens=20)
        worker = running.workers["decode-0"]
        worker.fail_at = {at: ("LeaseLost", True)}
        assert await reference(running, seed=8, max_tokens=20) == whole
        assert worker.seen("submit")[-1].attempt == 2


async def test_final_failure_before_the_first_byte_is_a_status(router: StartRouter) -> None:
    async with router() as running:
        running.workers["decode-0"].fail_at = {0: ("EngineError", False)}
        reply = await running.complete(stream=True)
        assert reply.status_code == 500
        assert reply.json()["error"]["type"] == "server_error"
        assert "scripted failure" not in reply.text


async def test_failure_after_the_first_byte_is_reported(router: StartRouter) -> None:
    async with router() as running:
        worker = running.workers["decode-0"]
        worker.step_s = 0.01
        worker.fail_at = {4: ("DeadlineExceeded", False)}
        reply = await running.complete(stream=True)
        assert reply.status_code == 200
        _, finish = text_of(reply.text)
        assert finish == "error"
        assert "event: error" in reply.text and "deadline_exceeded" in reply.text


async def test_attempts_are_bounded(router: StartRouter) -> None:
    async with router() as running:
        worker = running.workers["decode-0"]

        class Always(dict[int, tuple[str, bool]]):
            def __contains__(self, _: object) -> bool:
                return True

            def pop(self, *_: object) -> tuple[str, bool]:
                return ("Overloaded", True)

        worker.fail_at = Always()
        reply = await running.complete()
        assert reply.status_code == 503
        assert reply.headers["retry-after"]
        assert [submit.attempt for submit in worker.seen("submit")] == [1, 2, 3, 4]


async def test_no_worker_is_unavailable(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.router.dispatch.dispatcher.Dispatcher.place_wait_s", 0.2)
    async with router(workers=(), wait=False) as running:
        assert (await running.http.get("/readyz")).status_code == 503
        assert (await running.http.get("/livez")).status_code == 200
        reply = await running.complete()
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "unavailable"


async def test_a_draining_worker_gets_nothing(router: StartRouter) -> None:
    async with router(workers=WORKERS) as running:
        await both_linked(running)
        running.workers["decode-0"].draining = True

        async def ended_elsewhere() -> bool:
            before = len(running.workers["decode-0"].seen("submit"))
            for _ in range(4):
                await running.complete(max_tokens=1)
            return len(running.workers["decode-0"].seen("submit")) == before

        await eventually(ended_elsewhere)


async def test_a_worker_in_trouble_gets_nothing_and_the_router_says_so(router: StartRouter) -> None:
    async with router(workers=WORKERS) as running:
        await both_linked(running)

        async def ready(decode: int) -> bool:
            reply = await running.http.get("/readyz")
            return bool(reply.status_code == (200 if decode else 503)) and (
                not decode or reply.json()["workers"]["decode"] == decode
            )

        running.workers["decode-0"].reason = "a step is overdue by 1.0 s"
        await eventually(lambda: ready(1))
        before = len(running.workers["decode-0"].seen("submit"))
        for _ in range(4):
            assert (await running.complete(max_tokens=1)).status_code == 200
        assert len(running.workers["decode-0"].seen("submit")) == before
        running.workers["decode-1"].reason = "the pool is in quarantine"
        await eventually(lambda: ready(0))
        assert (await running.http.get("/livez")).status_code == 200
        for worker in running.workers.values():
            worker.reason = ""
        await eventually(lambda: ready(2))
