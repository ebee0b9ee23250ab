"""A worker that hangs: its device thread alone is held, so that a step never ends, while the
process lives, heartbeats go on and its admin port answers.

    a step runs ─▶ held ─▶ /readyz red, left by every router ─▶ released ─▶ green, used again

That its requests go on with the right tokens is judged as of every scenario; how soon each of
these comes is measured here. What does not come in its time is `broken`. So that there is a step
to hold it in, long prompts are asked beside the load until it is held.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import httpx

from chaos.held_thread import HeldThread, threads
from chaos.stage import Stage

DEVICE = "device"  # the engine's thread
LOCKING = re.compile(r"(libc|ld|python|libpython)[-.\d]")  # whose code may have a lock of all
RED_S = 2.0
STEPS_S = (0.1, 0.25, 0.5, 1.0)  # what 99 of 100 steps take at most, of the metrics' bounds
SLOWER_AT_MOST = 4.0  # a step may take so many times as long as the last ones before it is left
LEFT_S = 3.0  # by every router
ORDER_S = 0.5  # and so long after that time, where it is longer: with the longest of those steps
USED_S = 30.0  # after it goes on; its circuit opens for 5 s at first
WORK_S = 20.0  # for a step to run there
LONGS = 2  # at once
LIVES_S = 0.5  # for a process to answer that goes on
BREATH_S = 1.0
ATTEMPTS = 200
POLL_S = 0.05


@dataclass(slots=True)
class Hold:
    """`began_s`: of the loop's clock. `with_lock`, `between`: how often it was let go before, since
    others wait for it, or may, or since no step ran."""

    thread: HeldThread | None = None
    began_s: float = 0.0
    with_lock: int = 0
    between: int = 0

    def __str__(self) -> str:
        return f"let go {self.with_lock} times with a lock, {self.between} times between steps"


@dataclass(frozen=True, slots=True)
class Seen:
    """`ran_s`: how long the step had run before it was let go on. Seconds from the first moment of
    the hang: `red_s`, `left_s` (by the last router); from its end: `green_s`, `used_s`. `dead`:
    how often it did not say that it lives."""

    ran_s: float
    red_s: float
    left_s: float
    dead: int
    green_s: float
    used_s: float


async def hang(stage: Stage, name: str) -> None:
    """Hold the worker's device thread for as long as faults last, then let it go on."""
    is_held, turn = asyncio.Event(), itertools.cycle(stage.longs)

    async def ask_on() -> None:
        while not is_held.is_set():
            await stage.clients.ask(next(turn))

    asking = [asyncio.create_task(ask_on()) for _ in range(LONGS)]
    try:
        await _hang(stage, name, is_held)
    finally:
        is_held.set()
        await asyncio.gather(*asking)


async def _hang(stage: Stage, name: str, is_held: asyncio.Event) -> None:
    role = name.split("-")[0]
    step_s = await stage.do(_step_s, stage, name, role)
    before = {router: await _hangs(stage, router, role) for router in stage.named("router")}
    address = stage.cluster.records()[name].admin_address
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=5) as admin:
        (tid,) = threads(stage.cluster.pid(name), DEVICE)
        hold = await _held(tid, admin)
        is_held.set()
        if hold.thread is None:
            stage.void = f"{name} was never found at work with its loop turning: {hold}"
            return
        stage.notes.append(f"held in a step ({hold})")
        began_s, ran_s = hold.began_s, 0.0
        try:
            red_s, dead, *left_s = await asyncio.gather(
                _until(partial(_status, admin, "/readyz", 503), stage.hold_s, began_s),
                _not_living(admin, began_s + stage.hold_s),
                *(
                    _until(partial(_left, stage, router, role, hangs), stage.hold_s, began_s)
                    for router, hangs in before.items()
                ),
            )
            ran_s = await _so_far_s(admin)
        finally:
            hold.thread.release()
        green_s = await _until(partial(_status, admin, "/readyz", 200), USED_S)
    await stage.whole()
    used_s = await _used_again(stage, name)
    _judge(stage, name, step_s, Seen(ran_s, red_s, max(left_s), int(dead), green_s, used_s))


def _judge(stage: Stage, name: str, step_s: float, seen: Seen) -> None:
    stage.notes.append(
        f"which ran for {seen.ran_s:.1f} s: red after {seen.red_s:.2f} s, left after "
        f"{seen.left_s:.2f} s (its steps took at most {1000 * step_s:g} ms), green "
        f"{seen.green_s:.2f} s and used {seen.used_s:.1f} s after it went on"
    )
    if math.isinf(step_s):
        stage.void = f"steps of {name} take longer than {STEPS_S[-1]:g} s: no bound holds for them"
    red_most_s = math.inf if stage.void else RED_S
    left_most_s = max(LEFT_S, SLOWER_AT_MOST * step_s + ORDER_S)
    stage.broken += [
        said
        for kept, said in (
            (seen.ran_s >= stage.hold_s, f"the step of {name} ended while it was held"),
            (seen.red_s <= red_most_s, f"/readyz of {name} was red after {seen.red_s:.2f} s"),
            (seen.left_s <= left_most_s, f"a router left {name} after {seen.left_s:.2f} s"),
            (not seen.dead, f"/healthz of {name} was not 200 {seen.dead} times while it hung"),
            (seen.green_s <= USED_S, f"/readyz of {name} stayed red"),
            (seen.used_s <= USED_S, f"{name} was not used again within {USED_S:g} s"),
        )
        if not kept
    ]


async def _held(tid: int, admin: httpx.AsyncClient) -> Hold:
    """Held in a step. One that is held with Python's own lock, or as it waits for it, would stop
    its whole process, which is another fault: then it is let go, and held again once the process
    has its breath back. The thread is known only after an answer, so it is asked twice; and
    between two steps nothing hangs, so one has to run then. A lock of the C library's heap
    would be missed by others only once they free memory of this thread: so it is held
    nowhere in that library, nor in Python."""
    clock, found = asyncio.get_running_loop().time, Hold()
    for _ in range(ATTEMPTS):
        if await _until(partial(_works, admin), WORK_S) > WORK_S:
            break
        held, began_s = HeldThread(tid), clock()
        if LOCKING.match(held.code_file()):
            held.release()
            found.with_lock += 1
            # The thread has to release the lock first.
            await asyncio.sleep(POLL_S)
            continue
        lives = works = False
        try:
            with suppress(httpx.TimeoutException):
                works = await _works(admin, LIVES_S) and await _works(admin, LIVES_S)
                lives = True
        finally:
            if not works:
                held.release()
        if works:
            found.thread, found.began_s = held, began_s
            break
        found.between += lives
        found.with_lock += not lives
        # A worker that stood still has to answer again first.
        await asyncio.sleep(POLL_S if lives else BREATH_S)
    return found


async def _works(admin: httpx.AsyncClient, within_s: float = 5.0) -> bool:
    """Whether a step runs there, and a request has asked for one."""
    audit = (await admin.get("/audit", timeout=within_s)).json()
    return bool(audit.get("running")) and audit.get("step_s") is not None


async def _so_far_s(admin: httpx.AsyncClient) -> float:
    """Return the seconds that a step has run there, wanted by a request or not; 0 if none runs."""
    audit = (await admin.get("/audit")).json()
    return float(audit.get("step_s") or 0.0)


async def _status(admin: httpx.AsyncClient, path: str, status: int) -> bool:
    return (await admin.get(path)).status_code == status


async def _not_living(admin: httpx.AsyncClient, until_s: float) -> int:
    """How often it does not say that it lives."""
    clock, dead = asyncio.get_running_loop().time, 0
    while clock() < until_s:
        dead += not await _status(admin, "/healthz", 200)
        # Liveness is asked for at this period, as by Kubernetes.
        await asyncio.sleep(POLL_S)
    return dead


async def _left(stage: Stage, router: str, role: str, before: float) -> bool:
    return await _hangs(stage, router, role) > before


async def _hangs(stage: Stage, router: str, role: str) -> float:
    look = partial(stage.cluster.metric, router, "baton_hangs_total", role=role)
    found: float = await stage.do(look)
    return found


def _step_s(stage: Stage, name: str, role: str) -> float:
    """The time that 99 of 100 of its steps take at most."""
    look = partial(stage.cluster.metric, name)
    count = look("baton_step_seconds_count", role=role)
    for most_s in STEPS_S:
        if look("baton_step_seconds_bucket", le=str(most_s), role=role) >= 0.99 * count:
            return most_s
    return math.inf


async def _used_again(stage: Stage, name: str) -> float:
    """Seconds until a request is admitted there."""

    async def admitted() -> float:
        found: float = await stage.do(stage.cluster.metric, name, "baton_queue_seconds_count")
        return found

    before = await admitted()

    async def more() -> bool:
        return await admitted() > before

    return await _until(more, USED_S)


async def _until(
    happens: Callable[[], Awaitable[bool]], within_s: float, since_s: float | None = None
) -> float:
    """Seconds from then, or now, until it happens; infinitely many if it does not."""
    clock = asyncio.get_running_loop().time
    began_s = clock() if since_s is None else since_s
    while not await happens():
        if clock() - began_s > within_s:
            return math.inf
        # Other processes report nothing to this one: their answers are read again.
        await asyncio.sleep(POLL_S)
    return clock() - began_s
