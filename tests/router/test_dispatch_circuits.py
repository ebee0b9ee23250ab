"""The dispatcher's judgement of workers, and how it paces moves when they fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.proto import worker_pb2
from baton.router.circuits import STRIKES
from baton.runtime.errors import BatonError, OutOfMemory, Overloaded


async def test_a_worker_that_fails_everything_is_not_asked_again_and_again(
    scene_of: Any, output: Any, failed: Any
) -> None:
    """It is never busy, so it would be chosen for every request."""
    scene = scene_of("decode-0", "decode-1", "decode-2")
    for number in range(40):
        generation = await scene.start(f"r{number}")
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
        assert generation.over and generation.error is None
    assert len(scene.link(0).submits()) == 5
    assert scene.dispatcher._circuits.counts(asyncio.get_running_loop().time())["open"] == 1


def held(scene: Any, number: int, request_id: str, attempt: int) -> bool:
    return (request_id, attempt) in {
        (submit.request_id, submit.attempt) for submit in scene.link(number).submits()
    }


async def test_busy_and_draining_workers_are_no_outliers(scene_of: Any, failed: Any) -> None:
    scene = scene_of("decode-0", "decode-1", "decode-2")
    for code in ("Overloaded", "Draining", "InvalidRequest"):
        for number in range(8):
            await scene.start(f"{code}{number}")
            made = failed(code, code != "InvalidRequest", request_id=f"{code}{number}")
            scene.give(made, number=0)
            await scene.settle_down()
            scene.link(0).load.draining = False
    now_s = asyncio.get_running_loop().time()
    assert scene.dispatcher._circuits.counts(now_s)["open"] == 0
    await scene.dispatcher.close()


def failures(scene: Any, among: int, failed: Any) -> list[str]:
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


async def test_a_fleet_that_fails_everything_is_not_stormed(scene_of: Any, failed: Any) -> None:
    """Of 200 requests that fail wherever they are, a fifth is moved in all; the others end at
    once with the time to wait."""
    scene = scene_of("decode-0", "decode-1")
    generations = [await scene.start(f"r{number}") for number in range(200)]
    assert len(failures(scene, 2, failed)) == 200
    moved = 0
    for _ in range(4):
        await asyncio.sleep(0.12)
        moved += len(failures(scene, 2, failed))
    assert moved <= 40 + 10
    assert len(scene.dispatcher) == 0  # nobody is left waiting
    kinds = set()
    for generation in generations:
        with pytest.raises(BatonError) as ended:
            await generation.next()
        kinds.add(type(ended.value))
        if isinstance(ended.value, Overloaded):
            assert 0 < ended.value.retry_after_s <= 10
    assert Overloaded in kinds


async def test_a_burst_of_losses_is_paced_and_none_is_refused(scene_of: Any, output: Any) -> None:
    scene = scene_of("decode-0", "decode-1")
    generations = [await scene.start(f"r{number}") for number in range(100)]
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
    assert not any(generation.over for generation in generations)
    await scene.dispatcher.close()


async def test_a_client_that_leaves_gives_its_turn_back(scene_of: Any) -> None:
    scene = scene_of("decode-0", "decode-1", move_floor=1, move_share=0.0)
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


def strikes(scene: Any, name: str) -> float:
    circuit = scene.fleet.circuits._circuits.get(name.encode())
    return 0.0 if circuit is None else float(circuit.strikes)


async def test_no_memory_is_a_workers_fault_once_another_one_has_some(
    scene_of: Any, output: Any, failed: Any
) -> None:
    scene = scene_of("decode-0", "decode-1", "decode-2", max_attempts=4)
    generation = await scene.start()
    for number, attempt in ((0, 1), (1, 2)):
        scene.give(failed("OutOfMemory", True, attempt=attempt), number=number)
        await scene.settle_down()
    assert [strikes(scene, f"decode-{number}") for number in range(3)] == [0, 0, 0]
    scene.give(output(0, 10, attempt=3), output(1, 11, attempt=3), number=2)
    assert [strikes(scene, f"decode-{number}") for number in range(3)] == [1, 1, 0]
    scene.dispatcher.cancel(generation)


async def test_what_no_worker_has_memory_for_is_the_requests_own_fault(
    scene_of: Any, failed: Any
) -> None:
    """One client with such prompts would else close a fleet to all others."""
    scene = scene_of("decode-0", "decode-1", "decode-2", move_floor=100)
    for number in range(10):
        generation = await scene.start(f"r{number}")
        for attempt in (1, 2, 3):
            here = next(n for n in (0, 1, 2) if held(scene, n, f"r{number}", attempt))
            made = failed("OutOfMemory", True, request_id=f"r{number}", attempt=attempt)
            scene.give(made, number=here)
            await scene.settle_down()
        assert isinstance(generation.error, OutOfMemory)
    now_s = asyncio.get_running_loop().time()
    assert scene.fleet.circuits.counts(now_s)["open"] == 0
    assert [strikes(scene, f"decode-{number}") for number in range(3)] == [0, 0, 0]


async def test_failed_handoffs_count_against_the_prefill_worker(scene_of: Any, output: Any) -> None:
    scene = scene_of()
    for number in range(int(STRIKES)):
        generation = await scene.start(f"r{number}")
        (submission,) = scene.dispatcher._submissions.values()
        submission.prefill = b"prefill-0"
        first = output(0, 10, request_id=f"r{number}", failed_prefills=[b"prefill-0"])
        scene.give(first)
        assert strikes(scene, "prefill-0") == (number + 1) % STRIKES
        scene.give(first)  # told again, after a break of the link
        last = output(1, 1, request_id=f"r{number}", end=worker_pb2.STOP)
        scene.give(last)  # served, and not by that worker
        assert generation.over
    now_s = asyncio.get_running_loop().time()
    assert scene.fleet.circuits.passed_over(
        {b"prefill-0": "prefill", b"prefill-1": "prefill"}, now_s
    ) == {b"prefill-0"}


async def test_a_handoff_that_failed_before_its_request_did_counts_too(
    scene_of: Any, failed: Any
) -> None:
    scene = scene_of()
    await scene.start()
    scene.give(failed("InvalidRequest", False, failed_prefills=[b"p", b"q"]))
    assert (strikes(scene, "p"), strikes(scene, "q")) == (1, 1)


async def test_a_full_worker_has_failed_nobody(scene_of: Any, output: Any, failed: Any) -> None:
    """Each move finds its new worker full: it is given back, so that the next one may try."""
    scene = scene_of("decode-0", "decode-1", "decode-2", move_floor=1, move_share=0.0)
    for number in range(4):
        name = f"r{number}"
        generation = await scene.start(name)
        for attempt, code in ((1, "EngineError"), (2, "Overloaded"), (3, "")):
            async with asyncio.timeout(5):
                while not (at := [n for n in (0, 1, 2) if held(scene, n, name, attempt)]):
                    assert not generation.over, generation.error
                    await asyncio.sleep(0.01)
            if code:
                made = failed(code, True, request_id=name, attempt=attempt)
            else:
                made = output(0, 1, end=worker_pb2.STOP, request_id=name, attempt=attempt)
            scene.give(made, number=at[0])
        assert generation.over and generation.error is None


@pytest.mark.parametrize("last", ["Overloaded", "EngineError"])
async def test_a_fleet_that_is_full_is_not_asked_without_end(
    scene_of: Any, failed: Any, last: str
) -> None:
    """Whoever fails it in the end, its client can come back when there is room."""
    scene = scene_of("decode-0", "decode-1", move_floor=1, move_share=0.0, max_attempts=3)
    generation = await scene.start("r")
    for attempt in (1, 2, 3):
        await asyncio.sleep(0.02)
        (at,) = [n for n in (0, 1) if held(scene, n, "r", attempt)]
        code = last if attempt == 3 else "Overloaded"
        scene.give(failed(code, True, attempt=attempt), number=at)
    with pytest.raises(Overloaded):
        await generation.next()
    assert sum(len(scene.link(n).submits()) for n in (0, 1)) == 3
