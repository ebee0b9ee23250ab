"""Workers that are connected and compute nothing: left in time, and not believed afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import httpx
import pytest

from baton.proto import worker_pb2
from baton.runtime import metrics
from baton.runtime.config import RouterConfig
from tests.support.dispatch_scene import DispatchScene, output
from tests.support.json_values import Json
from tests.support.metric_values import metric_value
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartRouter
from tests.support.scripted_worker import ScriptedWorker
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

DEFAULTS = RouterConfig(port=0)


async def asked(
    running: RunningRouter, **fields: Json
) -> tuple[ScriptedWorker, ScriptedWorker, asyncio.Task[httpx.Response]]:
    """A request that is held at its third token; which worker has it, which has not, and its
    answer."""
    await eventually(lambda: all(w.seen("hello") for w in running.workers.values()))
    for worker in running.workers.values():
        worker.pause_at = 3
    task = asyncio.create_task(running.complete(seed=6, max_tokens=15, **fields))
    await eventually(lambda: any(w.held for w in running.workers.values()))
    (one,) = [w for w in running.workers.values() if w.held]
    (other,) = [w for w in running.workers.values() if w is not one]
    await eventually(lambda: len(next(iter(one.held.values())).outputs) == 3)
    other.pause_at = None
    return one, other, task


async def whole_text(running: RunningRouter) -> str:
    text: str = (await running.complete(seed=6, max_tokens=15)).json()["choices"][0]["text"]
    await eventually(lambda: not any(w.held for w in running.workers.values()))
    return text


async def test_requests_of_a_hung_worker_migrate_within_three_seconds(
    router: StartRouter, fair_watch: Callable[[], AbstractAsyncContextManager[Callable[[], float]]]
) -> None:
    """With the default times: the worker's loop lives and heartbeats, its device does nothing."""
    async with router(workers=("decode-0", "decode-1"), config=DEFAULTS) as running:
        whole = await whole_text(running)
        hung, other, answer = await asked(running)
        async with fair_watch() as so_far_s:
            telling = asyncio.create_task(_overdue(hung))
            await eventually(lambda: any(s.attempt == 2 for s in other.seen("submit")))
            assert so_far_s() < 3.0
        assert (await answer).json()["choices"][0]["text"] == whole
        await eventually(lambda: len(hung.seen("cancel")) == 1)
        await running.complete(max_tokens=2)  # nothing new goes there
        assert len(hung.seen("submit")) + len(other.seen("submit")) == 4
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _overdue(worker: ScriptedWorker) -> None:
    """As a worker tells it whose device stands still from now on."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while True:
        worker.overdue_ms = int(1000 * (loop.time() - began_s))
        # A worker reports at this period how long its step is overdue.
        await asyncio.sleep(0.02)


async def test_a_silent_worker_is_left_within_three_seconds(
    router: StartRouter, fair_watch: Callable[[], AbstractAsyncContextManager[Callable[[], float]]]
) -> None:
    """With the default times: not even heartbeats come. The silence was the grace."""
    async with router(workers=("decode-0", "decode-1"), config=DEFAULTS) as running:
        whole = await whole_text(running)
        silent, other, answer = await asked(running)
        async with fair_watch() as so_far_s:
            silent.silent = True
            await eventually(lambda: any(s.attempt == 2 for s in other.seen("submit")))
            assert so_far_s() < 3.0
        assert (await answer).json()["choices"][0]["text"] == whole


async def test_a_silent_worker_is_not_ready_within_two_seconds(
    router: StartRouter, fair_watch: Callable[[], AbstractAsyncContextManager[Callable[[], float]]]
) -> None:
    """With the default times. Its link stands for longer, and what it has stays there."""
    async with router(config=DEFAULTS) as running:
        worker = running.workers["decode-0"]
        assert await running.is_ready()

        async def red() -> bool:
            return not await running.is_ready()

        async with fair_watch() as so_far_s:
            worker.silent = True
            await eventually(red)
            assert so_far_s() < 2.0
        answer = asyncio.create_task(running.complete(max_tokens=2))
        # Nothing may be submitted in this time.
        await asyncio.sleep(0.3)
        assert not worker.seen("submit")  # it waits for a worker
        worker.silent = False
        assert (await answer).status_code == 200 and len(worker.seen("hello")) == 1


@pytest.mark.parametrize("alone", [True, False])
async def test_late_tokens_of_an_old_attempt_are_refused(router: StartRouter, alone: bool) -> None:
    """The device comes back and the worker has not heard the cancel: what it sends of the old
    attempt is dropped, even where the new attempt is on the same worker and link."""
    async with router(workers=("decode-0", "decode-1")[: 2 - alone]) as running:
        whole = await whole_text(running)
        if alone:
            hung = other = running.workers["decode-0"]
            hung.pause_at = 3
            answer = asyncio.create_task(running.complete(seed=6, max_tokens=15))
            await eventually(lambda: hung.held and next(iter(hung.held.values())).outputs)
        else:
            hung, other, answer = await asked(running)
        (held,) = hung.held.values()
        hung.overdue_ms = 60_000
        await eventually(lambda: bool(hung.seen("cancel")))
        wrong = worker_pb2.StepOutputs()
        for index in range(3, 6):  # tokens that the answer must not hold
            wrong.outputs.add(request_id=held.submit.request_id, attempt=1, index=index, token=5)
        hung.emit(wrong)
        hung.overdue_ms, hung.pause_at = 0, None
        await eventually(lambda: other.seen("submit")[-1].attempt == 2)
        hung.emit(wrong)
        assert (await answer).json()["choices"][0]["text"] == whole


async def test_another_boot_of_a_worker_cannot_speak_for_the_previous(
    router: StartRouter,
) -> None:
    async with router() as running:
        whole = await whole_text(running)
        worker = running.workers["decode-0"]
        worker.pause_at = 3
        answer = asyncio.create_task(running.complete(seed=6, max_tokens=15))
        await eventually(lambda: worker.held and next(iter(worker.held.values())).outputs)
        (held,) = worker.held.values()
        before = worker.boot_id
        await worker.die()
        await worker.start()
        assert worker.boot_id != before
        await eventually(lambda: worker.seen("submit")[-1].attempt == 2)
        wrong = worker_pb2.StepOutputs()
        for index in range(6):
            wrong.outputs.add(request_id=held.submit.request_id, attempt=1, index=index, token=5)
        worker.emit(wrong)
        worker.pause_at = None
        assert (await answer).json()["choices"][0]["text"] == whole


THREE = ("decode-0", "prefill-0", "prefill-1")
# Without a candidate that hangs, `auto` may find that the decode worker computes the prompt sooner.
HANDED_OVER = replace(FAST_ROUTER, placement="disaggregated")


async def prompted(running: RunningRouter) -> asyncio.Task[httpx.Response]:
    """A long prompt has come to decode-0, which says nothing before its `pause_at` is None."""
    workers, decode = running.workers, running.workers["decode-0"]
    await eventually(lambda: all(w.seen("hello") for w in workers.values()))
    decode.pause_at = 0
    prompt = "the quick brown fox jumps over the lazy dog " * 20
    answer = asyncio.create_task(running.complete(prompt=prompt, max_tokens=3))
    await eventually(lambda: bool(decode.seen("submit")))
    return answer


async def test_a_prompt_does_not_wait_for_a_prefill_worker_that_hangs(router: StartRouter) -> None:
    async with router(workers=THREE, config=HANDED_OVER) as running:
        workers, decode = running.workers, running.workers["decode-0"]
        answer = await prompted(running)
        first = decode.seen("submit")[0].placement.candidates[0].worker_id
        workers[first].overdue_ms = 60_000
        await eventually(lambda: len(decode.seen("submit")) == 2)
        again = decode.seen("submit")[1]
        (candidate,) = again.placement.candidates
        assert again.attempt == 2 and candidate.worker_id != first
        decode.pause_at = None
        assert (await answer).status_code == 200


def hangs() -> float:
    counted = metrics.HANGS.labels("prefill")
    return metric_value(counted)


@pytest.mark.parametrize("hangs_first", [True, False])
async def test_a_prompt_does_not_wait_for_a_hung_second_candidate(
    router: StartRouter, hangs_first: bool
) -> None:
    """Its decode worker tells which worker it asks now: whether that one hangs by then, or
    later."""
    async with router(workers=THREE, config=HANDED_OVER) as running:
        workers, decode = running.workers, running.workers["decode-0"]
        answer = await prompted(running)
        submit = decode.seen("submit")[0]
        first, second = submit.placement.candidates
        hung = workers[second.worker_id]
        before = hangs()
        if hangs_first:
            hung.overdue_ms = 60_000
            await eventually(lambda: hangs() == before + 1)
            assert len(decode.seen("submit")) == 1  # it waits for the other one
        turned = {"request_id": submit.request_id, "attempt": 1, "prefill_boot_id": second.boot_id}
        asked = worker_pb2.PrefillSwitch(**turned, failed_boot_ids=[first.boot_id])
        decode.emit(worker_pb2.StepOutputs(prefill_switches=[asked]))
        hung.overdue_ms = 60_000
        await eventually(lambda: len(decode.seen("submit")) == 2)
        again = decode.seen("submit")[1]
        assert again.attempt == 2
        assert [c.worker_id for c in again.placement.candidates] == [first.worker_id]
        decode.pause_at = None
        assert (await answer).status_code == 200


@on_virtual_time
async def test_whose_outputs_come_waits_for_no_prefill_worker() -> None:
    scene = DispatchScene("decode-0", "prefill-0", "prefill-1", placement="disaggregated")
    active_request = await scene.start()
    (attempt,) = scene.dispatcher.attempts.values()
    hung = scene.fleet.links["prefill-1"]
    hung.hung = True
    scene.tell(prefill_boot_id=b"prefill-1", output_received=True)
    assert attempt.attempt == 1 and attempt.link is not None
    scene.dispatcher.hung(hung)
    assert attempt.link is not None
    scene.tell(
        output(0, 10), prefill_boot_id=b"prefill-1"
    )  # its handoff failed after the first token
    assert attempt.link is None
    await scene.settle_down()
    (one, two) = scene.link().submits()
    assert (one.attempt, two.attempt) == (1, 2)
    scene.dispatcher.cancel(active_request)
