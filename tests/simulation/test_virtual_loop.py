"""The virtual loop: one seed, one order; time that jumps; asyncio's promises kept.
On virtual time."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time

import pytest

from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.machine import Machine
from baton.simulation.virtual.virtual_loop import Deadlock, OutOfTime, VirtualLoop


def loop_now() -> float:
    return asyncio.get_running_loop().time()


def virtual() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def test_a_day_of_virtual_time_takes_no_time() -> None:
    async def day() -> float:
        for _ in range(24):
            await asyncio.sleep(3600)
        return loop_now()

    started = time.perf_counter()
    assert virtual_loop.run(day()) == pytest.approx(86_400, abs=0.1)
    assert time.perf_counter() - started < 60


def test_callbacks_run_in_order_and_timers_by_their_time() -> None:
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(2.0, seen.append, "two")
        loop.call_later(1.0, seen.append, "one")
        cancelled = loop.call_later(1.5, seen.append, "never")
        for name in "abc":
            loop.call_soon(seen.append, name)
        loop.call_soon_threadsafe(seen.append, "d")
        cancelled.cancel()
        await asyncio.sleep(3)

    virtual_loop.run(main(), shuffle=True)
    assert seen == ["a", "b", "c", "d", "one", "two"]


def order(seed: int, *, shuffle: bool, timers: bool) -> list[int]:
    seen: list[int] = []

    async def main() -> None:
        async def one(number: int) -> None:
            await asyncio.sleep(1.0 if timers else 0)
            seen.append(number)

        at = loop_now() + 1.0
        if timers:
            for number in range(8):
                asyncio.get_running_loop().call_at(at, seen.append, number)
            await asyncio.sleep(2)
        else:
            await asyncio.gather(*(one(number) for number in range(8)))

    virtual_loop.run(main(), seed, shuffle=shuffle)
    assert sorted(seen) == list(range(8))
    return seen


def test_simultaneous_timers_and_tasks_are_ordered_by_the_seed() -> None:
    assert order(1, shuffle=False, timers=False) == list(range(8))
    for timers in (True, False):
        orders = {tuple(order(seed, shuffle=True, timers=timers)) for seed in range(5)}
        assert len(orders) > 1
        assert order(3, shuffle=True, timers=timers) == order(3, shuffle=True, timers=timers)


def test_a_tasks_steps_and_a_queue_keep_order_when_shuffled() -> None:
    async def main() -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(2)
        got: list[int] = []

        async def take() -> None:
            for _ in range(50):
                got.append(await queue.get())

        async def noise() -> None:
            for _ in range(60):
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            group.create_task(take())
            for _ in range(4):
                group.create_task(noise())
            for number in range(50):
                await queue.put(number)
        return got

    for seed in range(5):
        assert virtual_loop.run(main(), seed, shuffle=True) == list(range(50))


def test_the_error_of_a_deadlock_names_the_waiting_tasks() -> None:
    async def main() -> None:
        async def stuck() -> None:
            await asyncio.Event().wait()

        await asyncio.create_task(stuck(), name="the one that waits")

    with pytest.raises(Deadlock, match="the one that waits at stuck"):
        virtual_loop.run(main())


def test_the_error_of_a_time_limit_names_the_waiting_tasks() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1)

    loop = VirtualLoop(0)
    with pytest.raises(OutOfTime, match="10 s have passed; waiting: main at main"):
        loop.run(main(), limit_s=10)
    loop.close()


def test_polling_without_waiting_sees_the_clock_run() -> None:
    async def main() -> None:
        until = loop_now() + 0.001
        while loop_now() < until:
            await asyncio.sleep(0)

    virtual_loop.run(main())


def test_timeouts_wait_for_and_threads_work() -> None:
    async def main() -> str:
        started = loop_now()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 5)
        assert loop_now() - started == pytest.approx(10, abs=0.001)
        with pytest.raises(ValueError, match="of the thread"):
            await asyncio.to_thread(_fail)
        return await asyncio.get_running_loop().run_in_executor(None, str.upper, "inline")

    assert virtual_loop.run(main()) == "INLINE"


def _fail() -> None:
    raise ValueError("of the thread")


def test_what_a_callback_raises_fails_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(_fail)
        await asyncio.sleep(1)

    with pytest.raises(RuntimeError, match="_fail raised ValueError"):
        virtual_loop.run(main())


def test_what_is_left_at_the_end_is_closed_without_a_word() -> None:
    """Coroutines that never ran, that wait in their `finally`, and generators in their midst."""
    ended: list[str] = []

    async def main() -> None:
        async def reluctant() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(1)
                ended.append("reluctant")

        async def counting():
            try:
                while True:
                    yield 1
            finally:
                ended.append("generator")

        asyncio.create_task(reluctant(), name="reluctant")
        await asyncio.sleep(0.1)
        generator = counting()
        await anext(generator)
        asyncio.create_task(reluctant(), name="never begun")

    virtual_loop.run(main())
    assert ended == ["generator"]


TRACED = """
import asyncio, random
from baton.simulation.virtual.virtual_loop import VirtualLoop

async def main():
    queue = asyncio.Queue(3)
    dice = random.Random(5)
    done = set()

    async def worker(name):
        for _ in range(20):
            await asyncio.sleep(dice.choice([0, 0.5, 0.5, 1]))
            await queue.put(name)

    async def drain():
        while len(done) < 4 or not queue.empty():
            await queue.get()

    tasks = {asyncio.create_task(worker(f"w{n}")) for n in range(4)}
    draining = asyncio.create_task(drain())
    while tasks:
        over, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done |= over
        for task in tasks:
            task.add_done_callback(lambda _: None)
    for _ in range(3):
        await asyncio.sleep(0)
    draining.cancel()

loop = VirtualLoop(11, shuffle=True)
loop.trace = []
loop.run(main())
loop.close()
print("\\n".join(loop.trace))
"""


def test_the_same_seed_gives_the_same_trace_in_any_process() -> None:
    traces = {
        subprocess.run(
            [sys.executable, "-P", "-c", TRACED],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in (1, 2)
    }
    assert len(traces) == 1
    assert len(traces.pop().splitlines()) > 100


# -- machines --------------------------------------------------------------------------------


def test_a_paused_process_does_nothing_while_its_clock_runs() -> None:
    async def main() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []
        machine = Machine("m", "m")

        async def tick() -> None:
            for _ in range(4):
                await asyncio.sleep(1)
                seen.append(("tick", round(loop_now(), 1)))

        machine.spawn(tick(), "ticks")
        await asyncio.sleep(1.5)
        machine.pause()
        await asyncio.sleep(10)
        seen.append(("resume", round(loop_now(), 1)))
        machine.resume()
        await asyncio.sleep(5)
        return seen

    assert virtual_loop.run(main()) == [
        ("tick", 1.0),
        ("resume", 11.5),
        ("tick", 11.5),
        ("tick", 12.5),
        ("tick", 13.5),
    ]


def test_a_killed_process_and_its_children_run_no_finally() -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        machine = Machine("m", "m")

        async def child() -> None:
            try:
                await asyncio.sleep(5)
            finally:
                seen.append("finally")

        async def parent() -> None:
            await asyncio.gather(asyncio.create_task(child()), child())

        machine.spawn(parent(), "parent")
        await asyncio.sleep(1)
        machine.kill()
        await asyncio.sleep(20)
        machine.resume()  # the dead stay dead
        await asyncio.sleep(20)
        return list(seen)

    assert virtual_loop.run(main()) == []


def test_a_machines_clock_has_its_own_rate_and_beginning() -> None:
    async def main() -> tuple[float, float]:
        machine = Machine("m", "m", rate=1.05, offset_s=500.0)
        read: list[float] = []

        async def look() -> None:
            read.append(loop_now())
            await asyncio.sleep(10.5)
            read.append(loop_now())

        task = machine.spawn(look(), "look")
        await task
        assert read[1] - read[0] == pytest.approx(10.5, abs=0.001)
        return read[0], loop_now()

    first, world = virtual_loop.run(main())
    assert first == pytest.approx(500, abs=0.001)
    assert world == pytest.approx(10, abs=0.001)


def test_other_machines_continue_beside_a_paused_one() -> None:
    async def main() -> dict[str, int]:
        counts = {"a": 0, "b": 0}

        async def count(name: str) -> None:
            while True:
                await asyncio.sleep(random.Random(1).random())
                counts[name] += 1

        machines = {name: Machine(name, name) for name in counts}
        for name, machine in machines.items():
            machine.spawn(count(name), "count")
        await asyncio.sleep(5)
        before = counts["a"]
        machines["a"].pause()
        await asyncio.sleep(5)
        assert counts["a"] == before
        return counts

    counts = virtual_loop.run(main())
    assert counts["b"] == 2 * counts["a"] + 1 or counts["b"] == 2 * counts["a"]


def test_tasks_that_are_over_are_not_kept() -> None:
    async def main() -> int:
        for _ in range(2000):
            await asyncio.create_task(asyncio.sleep(0))
        return len(virtual().tasks)

    assert virtual_loop.run(main()) < 600
