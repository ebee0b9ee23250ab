"""A worker that is ended, as by SIGTERM, and is restarted: the production's own order.

    begins ─▶ it drains, its loop ends, it leaves the registry, its readers are through
      ─▶ stops ─▶ what it said still goes out ─▶ goes: another process under its name

The order is that of runtime/worker/drain.py, which a worker's process runs too; here is what it
runs on. It runs on the worker's machine: a pause of it is one of the drain.
"""

from __future__ import annotations

import asyncio
from functools import partial

from baton.runtime.worker import drain
from baton.simulation.fleet.world import World


async def roll(world: World, name: str) -> None:
    process = world.workers[name]
    course = drain.Course(process.role)
    course.drain()
    world.restart_stage("begins", process)

    async def stop() -> None:
        world.restart_stage("stops", process)
        await asyncio.sleep(drain.SERVER_GRACE_S)

    ends = drain.Ends(
        withdraw=partial(world.registry.withdraw, name, process.boot_id.hex()),
        finish=process.finish,
        stop=stop,
        close=process.mover.close,
    )
    drain_s = world.config.worker.drain_s
    await drain.serve_until(course, process.worker, process.task, [process.probe], drain_s, ends)
    world.loop.call_world(world.loop.world_s, _replace, world, name)


def _replace(world: World, name: str) -> None:
    process = world.workers[name]
    if process.machine.alive:  # else it was killed while it drained
        world.restart_stage("goes", process)
        world.kill(name, silent=False)
        world.restart(name)
