"""A worker that is ended, as by SIGTERM or by its device, and is restarted: the production order.

    begins ─▶ it drains, its loop ends, it leaves the registry, its readers are through
      ─▶ stops ─▶ what it said still goes out ─▶ goes: another process under its name

The order is that of runtime/worker/drain.py, which a worker's process runs too; here is what it
runs on. It runs on the worker's machine: a pause of it is one of the drain.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from baton.runtime.errors import DeviceLost
from baton.runtime.worker import drain
from baton.simulation.fleet.world import WorkerProcess, World

SUPERVISOR_S = 0.1  # before a worker that ended by itself is started again


async def roll(world: World, name: str) -> None:
    """Order the worker of that name to drain, and start another process in its place."""
    process = world.workers[name]
    course = drain.RoleControl(process.role)
    course.drain()
    world.restart_stage("begins", process)
    await _serve_out(world, process, course, partial(world.restart_stage, "stops", process))

    def replace() -> None:
        if process.machine.alive:  # else it was killed while it drained
            world.restart_stage("goes", process)
            _replace(world, process)

    world.loop.call_world(world.loop.world_s, replace)


async def end_lost(world: World, process: WorkerProcess) -> None:
    """End a worker whose loop has ended because its device is lost, and start another process in
    its place, as its supervisor does."""
    with contextlib.suppress(DeviceLost):  # the process's last words
        await _serve_out(world, process, drain.RoleControl(process.role), lambda: None)
    world.loop.call_world(world.loop.world_s + SUPERVISOR_S, _replace, world, process)


async def _serve_out(
    world: World, process: WorkerProcess, course: drain.RoleControl, stops: Callable[[], None]
) -> None:
    async def stop() -> None:
        stops()
        # This simulates the server's grace, on virtual time.
        await asyncio.sleep(drain.SERVER_GRACE_S)

    ends = drain.ShutdownSteps(
        withdraw=partial(world.withdraw, process),
        finish=process.finish,
        stop=stop,
        close=process.mover.close,
    )
    drain_s = world.config.worker.drain_s
    await drain.serve_until(course, process.worker, process.task, process.watches, drain_s, ends)


def _replace(world: World, process: WorkerProcess) -> None:
    name = process.machine.name
    if not process.machine.alive:
        return
    world.kill(name, silent=False)
    if world.start_s and name not in world.removed:
        world.loop.call_world(world.loop.world_s + world.start_s, world.restart, name)
    else:
        world.restart(name)
