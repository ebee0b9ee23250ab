"""The dispatcher's judgement of workers, and how it paces moves when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.proto import worker_pb2
from baton.router.fleet.circuits import STRIKES
from baton.runtime.errors import BatonError, OutOfMemory, Overloaded
from tests.support.dispatch_scene import DispatchScene, failed, output
from tests.support.router_books import strikes_of
from tests.support.virtual_time import on_virtual_time


@on_virtual_time
async def test_a_worker_that_fails_everything_is_not_retried_at_once() -> None:
    """It is never busy, so it would be chosen for every request."""
    scene = DispatchScene("decode-0", "decode-1", "decode-2")
    for number in range(40):
        active_request = await scene.start(f"r{number}")
        for attempt in (1, 2):
            name = next(n for n in (0, 1, 2) if held(scene, n, f"r{number}", attempt))
            if name == 0:
                made = failed("EngineError", True, request_id=f"r{number}", attempt=attempt)
                scene.give(made, number=0)
                await scene.settle_down()
            else:
                last = output(0, 1, end=worker_pb2.STOP, request_id=f"r{number}")
                last.attempt = attempt
                scene.give(last, number=name)
                break
        assert active_request.over and active_request.error is None
    assert len(scene.link(0).submits()) == 5
    assert scene.fleet.circuits.counts(asyncio.get_running_loop().time())["open"] == 1


def held(scene: DispatchScene, number: int, request_id: str, attempt: int) -> bool:
    return (request_id, attempt) in {
        (submit.request_id, submit.attempt) for submit in scene.link(number).submits()
    }


@on_virtual_time
async def test_busy_and_draining_workers_are_no_outliers() -> None:
    scene = DispatchScene("decode-0", "decode-1", "decode-2")
    for code in ("Overloaded", "Draining", "InvalidRequest"):
        for number in range(8):
            await scene.start(f"{code}{number}")
            made = failed(code, code != "InvalidRequest", request_id=f"{code}{number}")
            scene.give(made, number=0)
            await scene.settle_down()
            scene.link(0).load.draining = False
    now_s = asyncio.get_running_loop().time()
    assert scene.fleet.circuits.counts(now_s)["open"] == 0
    await scene.dispatcher.close()


def failures(
    scene: DispatchScene, among: int, failed: Callable[..., worker_pb2.Output]
) -> list[str]:
    """The requests that a worker now holds fail there; their ids."""
    failing = []
    for number in range(among):
        link = scene.link(number)
        for submit in [*link.submits()]:
            failing.append(submit.request_id)
            made = failed("EngineError", True, request_id=submit.request_id)
            made.attempt = submit.attempt
            scene.give(made, number=number)
        link.sent.clear()
    return failing


@on_virtual_time
async def test_a_fleet_that_fails_everything_is_not_stormed() -> None:
    """Of 200 requests that fail wherever they are, a fifth is moved in all; the others end at
    once with the time to wait."""
    scene = DispatchScene("decode-0", "decode-1")
    active_requests = [await scene.start(f"r{number}") for number in range(200)]
    assert len(failures(scene, 2, failed)) == 200
    moved = 0
    for _ in range(4):
        await asyncio.sleep(0.12)
        moved += len(failures(scene, 2, failed))
    assert moved <= 40 + 10
    assert len(scene.dispatcher) == 0  # no request is left waiting
    kinds = set()
    for active_request in active_requests:
        with pytest.raises(BatonError) as ended:
            await active_request.next()
        kinds.add(type(ended.value))
        if isinstance(ended.value, Overloaded):
            assert 0 < ended.value.retry_after_s <= 10
    assert Overloaded in kinds


@on_virtual_time
async def test_a_burst_of_losses_is_paced_and_none_is_refused() -> None:
    scene = DispatchScene("decode-0", "decode-1")
    active_requests = [await scene.start(f"r{number}") for number in range(100)]
    dying = scene.link(0)
    lost = {submit.request_id for submit in dying.submits()}
    assert len(lost) == 100
    dying.up = False
    scene.dispatcher.lost(dying, None, "dead")
    seen: list[int] = []
    answered: set[str] = set()
    async with asyncio.timeout(20):
        while answered != lost:
            await asyncio.sleep(0.02)
            fresh = [s for s in scene.link(1).submits() if s.attempt == 2]
            fresh = [submit for submit in fresh if submit.request_id not in answered]
            seen.append(len(fresh))
            for submit in fresh:
                answered.add(submit.request_id)
                made = output(0, 10, attempt=2, request_id=submit.request_id)
                scene.give(made, number=1)
    assert max(seen) <= 20  # a fifth of a hundred at once
    assert not any(active_request.over for active_request in active_requests)
    await scene.dispatcher.close()


@on_virtual_time
async def test_a_client_that_leaves_gives_its_turn_back() -> None:
    scene = DispatchScene("decode-0", "decode-1", retry_floor=1, retry_share=0.0)
    first, second = await scene.start("a"), await scene.start("b")
    for number in (0, 1):
        scene.dispatcher.lost(scene.link(number), None, "dead")
    await asyncio.sleep(0.1)
    again = [s.request_id for n in (0, 1) for s in scene.link(n).submits() if s.attempt == 2]
    assert len(again) == 1
    scene.dispatcher.cancel(first if again == ["a"] else second)
    await asyncio.sleep(0.1)
    again = [s.request_id for n in (0, 1) for s in scene.link(n).submits() if s.attempt == 2]
    assert sorted(again) == ["a", "b"]
    await scene.dispatcher.close()


def strikes(scene: DispatchScene, name: str) -> float:
    return strikes_of(scene.fleet.circuits, name.encode())


@on_virtual_time
async def test_no_memory_is_a_workers_fault_once_another_one_has_some() -> None:
    scene = DispatchScene("decode-0", "decode-1", "decode-2", max_attempts=4)
    active_request = await scene.start()
    for number, attempt in ((0, 1), (1, 2)):
        scene.give(failed("OutOfMemory", True, attempt=attempt), number=number)
        await scene.settle_down()
    assert [strikes(scene, f"decode-{number}") for number in range(3)] == [0, 0, 0]
    scene.give(output(0, 10, attempt=3), output(1, 11, attempt=3), number=2)
    assert [strikes(scene, f"decode-{number}") for number in range(3)] == [1, 1, 0]
    scene.dispatcher.cancel(active_request)


@on_virtual_time
async def test_what_no_worker_has_memory_for_is_the_requests_own_fault() -> None:
    """One client with such prompts would else close a fleet to all others."""
    scene = DispatchScene("decode-0", "decode-1", "decode-2", retry_floor=100)
    for number in range(10):
        active_request = await scene.start(f"r{number}")
        for attempt in (1, 2, 3):
            here = next(n for n in (0, 1, 2) if held(scene, n, f"r{number}", attempt))
            made = failed("OutOfMemory", True, request_id=f"r{number}", attempt=attempt)
            scene.give(made, number=here)
            await scene.settle_down()
        assert isinstance(active_request.error, OutOfMemory)
    now_s = asyncio.get_running_loop().time()
    assert scene.fleet.circuits.counts(now_s)["open"] == 0
    assert [strikes(scene, f"decode-{number}") for number in range(3)] == [0, 0, 0]


@on_virtual_time
async def test_lack_of_memory_takes_no_retries_from_others() -> None:
    """Such requests may use up their own share of moves; a worker's loss is moved all the same."""
    scene = DispatchScene("decode-0", "decode-1", retry_floor=3, retry_share=0.0, max_attempts=4)
    refused = 0
    for number in range(5):
        name = f"long{number}"
        active_request = await scene.start(name)
        for attempt in (1, 2, 3, 4):
            at = [n for n in (0, 1) if held(scene, n, name, attempt)]
            if not at:
                break
            made = failed("OutOfMemory", True, request_id=name, attempt=attempt)
            scene.give(made, number=at[0])
            await scene.settle_down()
        assert isinstance(active_request.error, OutOfMemory | Overloaded)
        refused += isinstance(active_request.error, Overloaded)
    assert refused == 4  # the first one's three moves are all that they get
    active_request = await scene.start("lost")
    (at,) = [n for n in (0, 1) if held(scene, n, "lost", 1)]
    scene.give(failed("EngineError", True, request_id="lost"), number=at)
    await scene.settle_down()
    assert held(scene, 1 - at, "lost", 2)
    last = output(0, 1, end=worker_pb2.STOP, request_id="lost", attempt=2)
    scene.give(last, number=1 - at)
    assert active_request.over and active_request.error is None


@on_virtual_time
async def test_failed_handoffs_count_against_the_prefill_worker() -> None:
    scene = DispatchScene("decode-0", "prefill-0", "prefill-1", placement="disaggregated")
    scene.fleet.circuits.record_failure(b"prefill-1", 0.0)
    for number in range(int(STRIKES)):
        name = f"r{number}"
        active_request = await scene.start(name)
        (submit,) = [s for s in scene.link().submits() if s.request_id == name]
        assert submit.placement.candidates[0].boot_id == b"prefill-0"
        turned = {
            "request_id": name,
            "prefill_boot_id": b"prefill-1",
            "failed_boot_ids": [b"prefill-0"],
        }
        scene.tell(**turned)
        assert strikes(scene, "prefill-0") == (number + 1) % STRIKES
        scene.tell(**turned)  # told again, after a break of the link
        scene.give(output(0, 1, request_id=name, end=worker_pb2.STOP))
        assert active_request.over
        assert strikes(scene, "prefill-1") == max(0, 1 - (number + 1) / 2)  # its merit
    now_s = asyncio.get_running_loop().time()
    assert scene.fleet.circuits.passed_over(
        {b"prefill-0": "prefill", b"prefill-1": "prefill"}, now_s
    ) == {b"prefill-0"}


@on_virtual_time
async def test_an_accusation_counts_though_the_end_comes_with_it() -> None:
    scene = DispatchScene("decode-0", "prefill-0", "prefill-1", placement="disaggregated")
    active_request = await scene.start()
    scene.fleet.circuits.record_failure(b"prefill-1", 0.0)
    end = output(0, 1, end=worker_pb2.STOP)
    scene.tell(
        end, prefill_boot_id=b"prefill-1", failed_boot_ids=[b"prefill-0"], output_received=True
    )
    assert active_request.over
    assert strikes(scene, "prefill-0") == 1 and strikes(scene, "prefill-1") == 0.5  # who served


@on_virtual_time
async def test_a_worker_accuses_none_but_those_that_it_was_to_ask() -> None:
    scene = DispatchScene("decode-0", "prefill-0", placement="disaggregated")
    active_request = await scene.start()
    scene.tell(prefill_boot_id=b"elsewhere", failed_boot_ids=[b"elsewhere", b"decode-0"])
    scene.tell(attempt=2, failed_boot_ids=[b"prefill-0"])  # nor of another attempt
    (attempt,) = scene.dispatcher.attempts.values()
    assert attempt.prefill == b""
    assert [strikes(scene, name) for name in ("elsewhere", "decode-0", "prefill-0")] == [0, 0, 0]
    scene.dispatcher.cancel(active_request)


@on_virtual_time
async def test_a_worker_that_failed_a_handoff_is_asked_last() -> None:
    scene = DispatchScene("decode-0", "prefill-0", "prefill-1", placement="disaggregated")
    active_request = await scene.start()
    scene.tell(prefill_boot_id=b"", failed_boot_ids=[b"prefill-0"])
    scene.give(failed("EngineError", True))
    await scene.settle_down()
    names = [c.worker_id for c in scene.link().submits()[1].placement.candidates]
    assert names == ["prefill-1", "prefill-0"]
    scene.dispatcher.cancel(active_request)


@on_virtual_time
async def test_a_half_open_circuit_is_probed_by_the_next_request() -> None:
    scene = DispatchScene(
        "decode-0", "prefill-0", "prefill-1", "prefill-2", placement="disaggregated"
    )
    now_s, circuits = asyncio.get_running_loop().time(), scene.fleet.circuits
    active_request = await scene.start()
    circuits.record_hang(b"prefill-2", now_s - 100)  # its time is over
    scene.tell(prefill_boot_id=b"prefill-2", failed_boot_ids=[b"prefill-0"])
    assert circuits.counts(now_s) == {"closed": 1, "open": 0, "half_open": 1}
    assert b"prefill-2" in circuits.passed_over({b"prefill-2": "prefill"} | FELLOWS, now_s)
    scene.give(output(0, 1, end=worker_pb2.STOP))
    assert active_request.over and circuits.counts(now_s)["half_open"] == 0


FELLOWS = {b"prefill-0": "prefill", b"prefill-1": "prefill"}


@on_virtual_time
async def test_a_full_worker_has_not_failed() -> None:
    """Each move finds its new worker full: it is returned, so that the next one may try."""
    scene = DispatchScene("decode-0", "decode-1", "decode-2", retry_floor=1, retry_share=0.0)
    for number in range(4):
        name = f"r{number}"
        active_request = await scene.start(name)
        for attempt, code in ((1, "EngineError"), (2, "Overloaded"), (3, "")):
            async with asyncio.timeout(5):
                while not (at := [n for n in (0, 1, 2) if held(scene, n, name, attempt)]):
                    assert not active_request.over, active_request.error
                    await asyncio.sleep(0.01)
            if code:
                made = failed(code, True, request_id=name, attempt=attempt)
            else:
                made = output(0, 1, end=worker_pb2.STOP, request_id=name, attempt=attempt)
            scene.give(made, number=at[0])
        assert active_request.over and active_request.error is None


@pytest.mark.parametrize("last", ["Overloaded", "EngineError"])
@on_virtual_time
async def test_a_fleet_that_is_full_is_not_asked_without_end(last: str) -> None:
    """Whichever worker fails it in the end, its client can come back when there is room."""
    scene = DispatchScene("decode-0", "decode-1", retry_floor=1, retry_share=0.0, max_attempts=3)
    active_request = await scene.start("r")
    for attempt in (1, 2, 3):
        await asyncio.sleep(0.02)
        (at,) = [n for n in (0, 1) if held(scene, n, "r", attempt)]
        code = last if attempt == 3 else "Overloaded"
        scene.give(failed(code, True, attempt=attempt), number=at)
    with pytest.raises(Overloaded):
        await active_request.next()
    assert sum(len(scene.link(n).submits()) for n in (0, 1)) == 3
