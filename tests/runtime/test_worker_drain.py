"""How a worker process ends: signalled once or twice, by a watch, by its own loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection
from functools import partial

import pytest

from baton.runtime import logs
from baton.runtime.errors import DeviceLost, EngineError
from baton.runtime.worker import drain
from baton.runtime.worker.drain import RoleControl, ShutdownSteps, serve_until
from tests.support.virtual_time import on_virtual_time


class Worker:
    """Writes down what happens to it; `work` is what a drain waits for."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.work = asyncio.Event()
        self.loop_fails = asyncio.Event()
        self.story: list[str] = []
        self.end_fails = False

    async def run(self) -> None:
        try:
            await self.loop_fails.wait()
            self.work.set()
            raise DeviceLost("no answer")
        except asyncio.CancelledError:
            self.story.append("loop ended" if self.draining.is_set() else "loop ended undrained")
            if self.end_fails:
                raise ValueError("a handoff does not close") from None
            raise

    async def drain(self, within_s: float) -> None:
        self.draining.set()
        self.story.append(f"drain {within_s:g}")
        await self.work.wait()
        self.story.append("drained")

    def ends(self, failing: str = "") -> ShutdownSteps:
        def at(name: str) -> None:
            self.story.append(name)
            if name == failing:
                raise ValueError(f"{name} fails")

        async def later(name: str) -> None:
            at(name)

        return ShutdownSteps(
            withdraw=partial(at, "withdrawn"),
            finish=partial(later, "finished"),
            stop=partial(later, "stopped"),
            close=partial(later, "closed"),
        )


ENDS = ["withdrawn", "finished", "stopped", "closed"]


def start(
    worker: Worker, watches: Collection[asyncio.Task[None]] = (), failing: str = ""
) -> tuple[RoleControl, asyncio.Task[None]]:
    course, running = RoleControl("decode"), asyncio.create_task(worker.run())
    serving = serve_until(course, worker, running, watches, 7.0, worker.ends(failing))
    return course, asyncio.create_task(serving)


@on_virtual_time
async def test_one_order_to_end_drains_and_then_ends_the_loop() -> None:
    worker = Worker()
    course, serving = start(worker)
    await asyncio.sleep(0.01)
    assert worker.story == [] and not serving.done()
    course.end()
    await asyncio.sleep(0.01)
    assert worker.story == ["drain 7"] and not serving.done()
    worker.work.set()
    await asyncio.wait_for(serving, 5)
    assert worker.story == ["drain 7", "drained", "loop ended", *ENDS]


@on_virtual_time
async def test_a_second_order_to_end_stops_the_wait() -> None:
    worker = Worker()
    course, serving = start(worker)
    await asyncio.sleep(0.01)
    course.end()
    await asyncio.sleep(0.01)
    course.end()
    await asyncio.wait_for(serving, 5)
    assert worker.story == ["drain 7", "loop ended", *ENDS]


@on_virtual_time
async def test_a_repeated_or_early_order_to_drain_hurries_nothing() -> None:
    worker = Worker()
    course, serving = start(worker)
    await asyncio.sleep(0.01)
    for reported in (course.drain, course.drain, course.end):
        reported()
        await asyncio.sleep(0.01)
        assert worker.story == ["drain 7"] and not serving.done()
    course.end()  # the second signal
    await asyncio.wait_for(serving, 5)
    assert worker.story == ["drain 7", "loop ended", *ENDS]


@on_virtual_time
async def test_a_loop_that_fails_is_raised_and_not_drained() -> None:
    worker = Worker()
    _, serving = start(worker)
    await asyncio.sleep(0.01)
    worker.loop_fails.set()
    with pytest.raises(DeviceLost):
        await asyncio.wait_for(serving, 5)
    assert worker.story == ENDS


@on_virtual_time
async def test_a_loop_that_fails_in_a_drain_ends_it_and_is_raised() -> None:
    worker = Worker()
    course, serving = start(worker)
    await asyncio.sleep(0.01)
    course.end()
    await asyncio.sleep(0.01)
    worker.loop_fails.set()
    with pytest.raises(DeviceLost):
        await asyncio.wait_for(serving, 5)
    assert worker.story[0] == "drain 7" and "loop ended" not in worker.story


@on_virtual_time
async def test_a_watch_that_fails_drains_first_and_is_raised_then() -> None:
    worker = Worker()
    alarm = asyncio.Event()

    async def watch() -> None:
        await alarm.wait()
        raise EngineError("too much quarantine")

    watching = asyncio.create_task(watch())
    _, serving = start(worker, [watching])
    await asyncio.sleep(0.01)
    alarm.set()
    await asyncio.sleep(0.01)
    assert worker.story == ["drain 7"] and not serving.done()
    worker.work.set()
    with pytest.raises(EngineError, match="quarantine"):
        await asyncio.wait_for(serving, 5)
    assert worker.story == ["drain 7", "drained", "loop ended", *ENDS]


def test_the_next_role_is_the_last_ordered_until_an_end() -> None:
    course = RoleControl("prefill")
    assert course.begin() == "prefill"
    course.change("prefill")
    assert not course.changed.is_set()  # that is what it does
    course.change("decode")
    assert course.changed.is_set() and course.begin() == "decode" and not course.changed.is_set()
    course.change("prefill")
    course.end()
    course.change("decode")
    assert course.begin() is None and not course.hurried.is_set()
    course.end()
    assert course.hurried.is_set()


@on_virtual_time
async def test_an_order_to_end_after_a_role_change_drains_in_peace() -> None:
    worker = Worker()
    course, serving = start(worker)
    await asyncio.sleep(0.01)
    course.change("prefill")
    await asyncio.sleep(0.01)
    course.end()
    await asyncio.sleep(0.01)
    assert worker.story == ["drain 7"] and not serving.done()
    worker.work.set()
    await asyncio.wait_for(serving, 5)
    assert course.begin() is None


@on_virtual_time
async def test_what_fails_in_the_loops_own_end_is_raised() -> None:
    worker = Worker()
    worker.end_fails = True
    course, serving = start(worker)
    await asyncio.sleep(0.01)
    worker.work.set()
    course.end()
    with pytest.raises(ValueError, match="does not close"):
        await asyncio.wait_for(serving, 5)


@on_virtual_time
async def test_what_failed_first_is_raised_and_what_followed_is_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.setup("w")
    worker = Worker()
    worker.end_fails = True
    worker.work.set()

    async def watch() -> None:
        raise EngineError("too much quarantine")

    _, serving = start(worker, [asyncio.create_task(watch())])
    with pytest.raises(EngineError, match="quarantine"):
        await asyncio.wait_for(serving, 5)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["reason"] for line in lines if line["event"] == "worker failed"] == [
        "too much quarantine",
        "a handoff does not close",
    ]


@on_virtual_time
async def test_a_loop_that_does_not_end_is_reported_and_not_awaited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drain, "LOOP_END_TIMEOUT_S", 0.05)
    logs.setup("w")
    free = asyncio.Event()

    class Deaf(Worker):
        async def run(self) -> None:
            while not free.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await free.wait()

    worker = Deaf()
    worker.work.set()
    course, serving = start(worker)
    await asyncio.sleep(0.01)
    course.end()
    await asyncio.wait_for(serving, 5)
    assert "worker tasks not ended" in capsys.readouterr().err
    free.set()
    await asyncio.sleep(0.01)


@on_virtual_time
async def test_what_can_finish_nothing_hands_back_at_once() -> None:
    """A watch that hurries before it fails: nothing waits for steps that all fail."""
    worker = Worker()
    course = RoleControl("decode")

    async def watch() -> None:
        course.hurry()
        raise EngineError("all steps fail")

    watching, running = asyncio.create_task(watch()), asyncio.create_task(worker.run())
    with pytest.raises(EngineError, match="all steps fail"):
        serving = serve_until(course, worker, running, [watching], 7.0, worker.ends())
        await asyncio.wait_for(serving, 5)
    assert worker.story == ["drain 7", "loop ended", *ENDS]


@pytest.mark.parametrize("failing", ENDS)
@on_virtual_time
async def test_the_steps_of_an_end_keep_their_order_whatever_fails(failing: str) -> None:
    worker = Worker()
    worker.work.set()
    course, serving = start(worker, failing=failing)
    await asyncio.sleep(0.01)
    course.end()
    with pytest.raises(ValueError, match=f"{failing} fails"):
        await asyncio.wait_for(serving, 5)
    assert worker.story == ["drain 7", "drained", "loop ended", *ENDS]


@on_virtual_time
async def test_the_error_of_a_failed_loop_wins_over_later_failures() -> None:
    """A lost device ends the process by a code of its own."""
    worker = Worker()
    _, serving = start(worker, failing="finished")
    await asyncio.sleep(0.01)
    worker.loop_fails.set()
    with pytest.raises(DeviceLost):
        await asyncio.wait_for(serving, 5)
    assert worker.story == ENDS
