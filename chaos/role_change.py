"""A worker's role is changed under load, by `baton role` as a user gives it, and changed back.

    prefill worker ─ baton role W decode ─▶ decode worker ─ baton role W prefill ─▶ prefill worker

One process all the while, which loads its weights once: its id stays, and its log tells of no
second load. In each role it must be found at work.
"""

from __future__ import annotations

import asyncio

from chaos.stage import Stage

USED_S = 20.0
POLL_S = 0.1
LOADED = "model loaded"  # a worker's log, once for each time


async def change_role(stage: Stage, name: str) -> None:
    """Change the role to decode and back to prefill; each lasts as long as faults do."""
    cluster, clock = stage.cluster, asyncio.get_running_loop().time
    pid, loads = cluster.pid(name), _loads(stage, name)
    took_s = []
    for role in ("decode", "prefill"):
        began_s = clock()
        await stage.do(cluster.change_role, name, role)
        await stage.whole()
        took_s.append(clock() - began_s)
        if not await _used(stage, name):
            stage.broken.append(f"{name} was not used as a {role} worker within {USED_S:g} s")
        await stage.hold()
    record = (await stage.do(cluster.records)).get(name)
    if record is None or record.pid != pid or _loads(stage, name) != loads:
        stage.broken.append(
            f"{name} is not the process that it was, or has loaded its weights again"
        )
    heard = " and ".join(f"{seconds:.1f} s" for seconds in took_s)
    stage.notes.append(f"changed in {heard}, in one process ({loads} load of weights)")


def _loads(stage: Stage, name: str) -> int:
    """How often the process has loaded weights, of those that this name has had."""
    return (stage.cluster.folder / f"{name}.log").read_text(errors="replace").count(LOADED)


async def _used(stage: Stage, name: str) -> bool:
    """Whether a request, or a prompt, is admitted there in time."""
    look = (stage.cluster.metric, name, "baton_queue_seconds_count")
    before = await stage.do(*look)
    clock = asyncio.get_running_loop().time
    until_s = clock() + USED_S
    while await stage.do(*look) <= before:
        if clock() > until_s:
            return False
        # A worker's metrics can only be read again.
        await asyncio.sleep(POLL_S)
    return True
