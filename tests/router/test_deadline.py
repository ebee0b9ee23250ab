"""Deadlines: what a client may ask for, and requests that are ended in each of their phases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from baton.proto import worker_pb2
from baton.router.fleet.fleet import Fleet
from baton.router.requests.deadline import deadline_of, until
from baton.router.text.tokenizer import ENCODE_THREADS
from baton.runtime import metrics
from baton.runtime.errors import DeadlineExceeded, InvalidRequest
from tests.support.dispatch_scene import DispatchScene, output
from tests.support.encoding_threads import EncodingThreads
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness
from tests.support.router_books import retrying
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartRouter
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

DEADLINE_S = slowness()  # within which a processor has to bring a request to its phase


@pytest.mark.parametrize(
    ("given", "seconds"), [([], 60.0), (["2.5"], 2.5), ([" 60 "], 60.0), (["0.000001"], 1e-6)]
)
def test_a_deadline_is_seconds_from_the_arrival(given: list[str], seconds: float) -> None:
    assert deadline_of(given, 100.0, 60.0) == 100.0 + seconds


@pytest.mark.parametrize(
    "text",
    ["", "0", "0.0", "-1", "+1", "61", "1e1", "nan", "inf", "1_0", "٣", "1s", "0x1", "1,5", ".5",
     "9" * 400, "2026-01-01T00:00:00Z"],
)  # fmt: skip
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match="X-Request-Deadline is") as refused:
        deadline_of([text], 100.0, 60.0)
    assert refused.value.field == "X-Request-Deadline" and len(str(refused.value)) < 300


def test_two_deadlines_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'1, 2'"):
        deadline_of(["1", "2"], 100.0, 60.0)


async def test_what_runs_is_cancelled_at_the_deadline() -> None:
    now_s = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded):
        async with until(now_s + 0.05):
            await asyncio.sleep(30)  # This is what the deadline cuts.
    with pytest.raises(DeadlineExceeded):
        async with until(now_s - 1):
            await asyncio.sleep(30)  # This is what the deadline cuts.
    async with until(now_s + 30):
        pass


async def test_a_timeout_of_the_inside_is_not_the_deadlines() -> None:
    now_s = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError) as raised:
        async with until(now_s + 30):
            raise TimeoutError("mine")
    assert str(raised.value) == "mine"


def headers(seconds: float) -> dict[str, str]:
    return {"x-request-deadline": f"{seconds:g}"}


BODY = {"model": "tiny", "prompt": "the quick brown", "max_tokens": 50}


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_byte_it_is_a_504(
    router: StartRouter,
    fair_watch: Callable[[], AbstractAsyncContextManager[Callable[[], float]]],
    stream: bool,
) -> None:
    async with router() as running:
        worker = running.workers["decode-0"]
        worker.pause_at = 0
        loop = asyncio.get_running_loop()
        async with fair_watch() as so_far_s:
            started_s = loop.time()
            reply = await running.http.post(
                "/v1/completions", json={**BODY, "stream": stream}, headers=headers(DEADLINE_S)
            )
            assert reply.status_code == 504
            assert loop.time() - started_s >= DEADLINE_S and so_far_s() < DEADLINE_S + 2.0
        assert reply.json()["error"]["code"] == "deadline_exceeded"
        (submit,) = worker.seen("submit")
        assert 0 < submit.deadline_ms <= 1000 * DEADLINE_S
        await eventually(lambda: not worker.held)  # told in the same tick


async def test_after_the_first_byte_it_is_an_event(router: StartRouter) -> None:
    async with router() as running:
        worker = running.workers["decode-0"]
        worker.step_s = 0.02  # tokens keep coming until the deadline
        reply = await running.http.post(
            "/v1/completions",
            json={**BODY, "max_tokens": 3000, "stream": True},
            headers=headers(0.5 * DEADLINE_S),
        )
        assert reply.status_code == 200
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["error"]["code"] == "deadline_exceeded"
        assert json.loads(lines[-3])["choices"][0]["finish_reason"] == "error"
        await eventually(lambda: not worker.held)


async def test_while_the_body_comes(router: StartRouter) -> None:
    async with router() as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n"
            b"x-request-deadline: 0.2\r\n\r\n{"
        )
        async with asyncio.timeout(10):
            assert b" 504 " in await reader.readline()
        writer.close()
        assert not running.workers["decode-0"].seen("submit")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "the quick brown"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_while_the_prompt_waits_for_a_tokenizer_thread(
    router: StartRouter,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    asked: JsonObject,
) -> None:
    threads = EncodingThreads(monkeypatch)
    threads.go.clear()

    async def ask(seconds: float) -> tuple[int, float]:
        started_s = asyncio.get_running_loop().time()
        body = {"model": "tiny", "max_tokens": 2, **asked}
        async with asyncio.timeout(20 * slowness()):  # a thread that is held lasts longer than that
            reply = await running.http.post(path, json=body, headers=headers(seconds))
        return reply.status_code, asyncio.get_running_loop().time() - started_s

    async with router() as running:
        try:
            at_threads = [asyncio.create_task(ask(2.0 * DEADLINE_S)) for _ in range(ENCODE_THREADS)]
            await eventually(lambda: len(threads.begun) == ENCODE_THREADS)
            status, took_s = await ask(0.3 * DEADLINE_S)
            assert status == 504 and took_s >= 0.3 * DEADLINE_S
            assert len(threads.begun) == ENCODE_THREADS  # no thread has looked at it
            for status, took_s in await asyncio.gather(*at_threads):  # nor does one hold it up
                assert status == 504 and took_s >= 2.0 * DEADLINE_S
        finally:
            threads.go.set()
        assert not running.workers["decode-0"].seen("submit")
        assert (await ask(60))[0] == 200
        assert len(threads.begun) == ENCODE_THREADS + 1


async def test_a_client_that_leaves_a_waiting_prompt_takes_no_thread(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = EncodingThreads(monkeypatch)
    threads.go.clear()

    def held_bytes() -> float | None:
        return metrics.REGISTRY.get_sample_value("baton_body_bytes")

    async with router() as running:
        worker, asking = running.workers["decode-0"], []
        try:
            for number in range(ENCODE_THREADS + 1):
                asking.append(asyncio.create_task(running.complete(prompt=f"prompt {number}")))
                at_threads = min(number + 1, ENCODE_THREADS)
                await eventually(lambda wanted=at_threads: len(threads.begun) == wanted)
            for each in asking:
                each.cancel()  # each closes its connection
            await asyncio.gather(*asking, return_exceptions=True)
            await eventually(lambda: held_bytes() == 0)  # while the threads are still held
        finally:
            threads.go.set()
        assert (await running.complete(max_tokens=2)).status_code == 200
        assert len(threads.begun) == ENCODE_THREADS + 1 and len(worker.seen("submit")) == 1


async def test_calls_that_generate_nothing_do_not_wait_for_workers(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue before the workers once refused `/tokenize` and `/explain` too."""
    monkeypatch.setattr(Fleet, "expected_s", lambda self: 100.0)
    async with router() as running:
        body = {"model": "tiny", "prompt": "hi"}
        for path in ("/tokenize", "/v1/completions/explain"):
            reply = await running.http.post(path, json=body, headers=headers(2))
            assert reply.status_code == 200
        reply = await running.http.post("/v1/completions", json=body, headers=headers(2))
        assert reply.status_code == 503 and "so many requests wait" in reply.text


async def test_while_no_worker_is_there(router: StartRouter) -> None:
    async with router(workers=(), wait=False) as running:
        asked = headers(0.2 * DEADLINE_S)
        reply = await running.http.post("/v1/completions", json=BODY, headers=asked)
        assert reply.status_code == 504
        assert "no decode worker" in reply.json()["error"]["message"]


async def test_the_longest_life_is_a_setting(router: StartRouter) -> None:
    async with router(config=replace(FAST_ROUTER, request_s=0.3)) as running:
        reply = await running.http.post("/v1/completions", json=BODY, headers=headers(5))
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "X-Request-Deadline"
        running.workers["decode-0"].pause_at = 0
        assert (await running.complete()).status_code == 504


@on_virtual_time
async def test_a_deadline_ends_a_request_under_way() -> None:
    scene = DispatchScene()
    active_request = await scene.start(within_s=0.1)
    scene.give(output(0, 10))
    assert (await active_request.next())[0].token == 10
    with pytest.raises(DeadlineExceeded, match="has passed"):
        await active_request.next()
    assert scene.link().cancels() == [("r", 1)] and len(scene.dispatcher) == 0
    (submit,) = scene.link().submits()
    assert 0 < submit.deadline_ms <= 100


@on_virtual_time
async def test_a_deadline_ends_the_wait_for_a_first_worker() -> None:
    scene = DispatchScene()
    scene.dispatcher.place_wait_s = 20
    scene.link().up = False
    with pytest.raises(DeadlineExceeded, match="while it waited: no decode worker"):
        await scene.start(within_s=0.1)
    with pytest.raises(DeadlineExceeded):
        await scene.start(within_s=0)  # it was over before it came so far
    assert len(scene.dispatcher) == 0 and not scene.link().sent


@on_virtual_time
async def test_a_deadline_ends_the_wait_between_two_attempts() -> None:
    scene = DispatchScene()
    scene.dispatcher.place_wait_s = 20
    active_request = await scene.start(within_s=0.15)
    scene.link().up = False
    scene.dispatcher.lost(scene.link(), None, "dead")
    with pytest.raises(DeadlineExceeded):
        await active_request.next()
    scene.link().up = True
    await asyncio.sleep(0.1)
    assert len(scene.link().submits()) == 1 and len(scene.dispatcher) == 0


@on_virtual_time
async def test_a_deadline_ends_the_wait_for_a_turn_to_be_moved() -> None:
    scene = DispatchScene("decode-0", "decode-1", retry_floor=1, retry_share=0.0)
    loop = asyncio.get_running_loop()
    first = await scene.start("a")
    second = await scene.start("b", within_s=0.3)
    started_s = loop.time()
    for number in (0, 1):
        scene.dispatcher.lost(scene.link(number), None, "dead")
    with pytest.raises(DeadlineExceeded):
        await second.next()
    assert 0.29 < loop.time() - started_s < 0.31
    assert second.migrations == 0 and moved(scene) == ["a"]
    await asyncio.sleep(0.1)
    assert len(scene.dispatcher) == 1 and not retrying(scene.dispatcher) and not first.over
    third = await scene.start("c")
    for number in (0, 1):
        if "c" in [submit.request_id for submit in scene.link(number).submits()]:
            scene.dispatcher.lost(scene.link(number), ["c"], "not held")
    await asyncio.sleep(0.1)
    assert moved(scene) == ["a"]  # a's turn is not over
    for number in (0, 1):
        scene.give(output(0, 10, request_id="a", attempt=2), number=number)
    await asyncio.sleep(0.1)
    assert moved(scene) == ["a", "c"] and not third.over
    await scene.dispatcher.close()


def moved(scene: DispatchScene) -> list[str]:
    submits = [submit for number in (0, 1) for submit in scene.link(number).submits()]
    return sorted(submit.request_id for submit in submits if submit.attempt == 2)


@on_virtual_time
async def test_a_later_attempt_gets_the_remaining_time() -> None:
    scene = DispatchScene("decode-0", "decode-1")
    await scene.start(within_s=5)
    await asyncio.sleep(0.2)
    scene.link(0).up = False
    scene.dispatcher.lost(scene.link(0), None, "dead")
    await scene.settle_down()
    (first,), (second,) = scene.link(0).submits(), scene.link(1).submits()
    assert second.deadline_ms <= first.deadline_ms - 200
    await scene.dispatcher.close()


@on_virtual_time
async def test_an_end_before_the_deadline_leaves_no_timer() -> None:
    scene = DispatchScene()
    active_request = await scene.start()
    assert active_request.timer is not None and not active_request.timer.cancelled()
    scene.give(output(0, 1, end=worker_pb2.STOP))
    assert active_request.timer.cancelled() and active_request.error is None


async def test_a_request_too_late_is_refused_before_its_body(router: StartRouter) -> None:
    async with router() as running:
        worker = running.workers["decode-0"]
        worker.waiting = 400

        async def end_one_now_and_then() -> None:
            while True:
                worker.served += 1
                # The worker ends requests at this period.
                await asyncio.sleep(0.02)

        async def ask(deadline: str, body: bytes = b"") -> bytes:
            host, port = running.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n"
                b"x-request-deadline: %s\r\n\r\n" % deadline.encode()
            )
            async with asyncio.timeout(20):
                head = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            return head.lower()

        ending = asyncio.create_task(end_one_now_and_then())
        async with asyncio.timeout(20):
            while b" 503 " not in (head := await ask("0.5")):
                assert b" 504 " in head  # nothing of its body came by then
        assert int(head.split(b"retry-after: ")[1].split()[0]) >= 4  # 400, 20 ms each
        reply = await running.complete(max_tokens=2)  # it has an hour
        assert reply.status_code == 200
        worker.waiting = 0
        await eventually(lambda: _is_served(running))
        ending.cancel()


async def _is_served(running: RunningRouter) -> bool:
    reply = await running.http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": "a", "max_tokens": 1},
        headers={"X-Request-Deadline": "5"},
    )
    return bool(reply.status_code == 200)
