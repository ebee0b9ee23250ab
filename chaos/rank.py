"""A worker whose model is split over ranks, and one rank of it killed or stopped.

    rank struck ─▶ a sum lacks it ─▶ the worker ends, its other ranks too ─▶ its requests migrate

No worker goes on without a rank, so its end is what is waited for. A stopped rank is as good as a
dead one: it must end with its worker, and not be left behind. What comes too late is `broken`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from chaos.stage import Stage

ENDS_S = 3.0  # from the fault to the end of the worker's process
ORPHAN_S = 2.0  # from the end of the leader to the end of its ranks
_POLL_S = 0.02
_MAIN = b"baton.engine.ranks.rank_process"


async def strike_rank(stage: Stage, name: str, signal_name: str) -> None:
    """Send a signal to the first rank that worker `name` leads, and wait for the worker's end."""
    ranks = rank_ids(stage.cluster.pid(name))
    if not ranks:
        stage.void = f"{name} leads no rank"
        return
    os.kill(ranks[0], signal.Signals[signal_name])
    clock = asyncio.get_running_loop().time
    struck_s = clock()
    while stage.cluster.alive(name) and clock() < struck_s + 4 * ENDS_S:
        # The cluster polls its processes and awaits none.
        await asyncio.sleep(_POLL_S)
    took_s = clock() - struck_s
    if stage.cluster.alive(name):
        stage.broken.append(f"{name} lives {took_s:.1f} s after {signal_name} of its rank")
        os.kill(ranks[0], signal.SIGKILL)  # else nothing ends this fleet's worker
        return
    stage.notes.append(f"{name} ended {took_s:.2f} s after {signal_name} of its rank")
    if took_s > ENDS_S:
        stage.broken.append(f"{name} ended {took_s:.1f} s after {signal_name}, not {ENDS_S:g} s")
    # Ranks are processes of another parent: they get this time to end.
    await asyncio.sleep(ORPHAN_S)
    if left := [rank for rank in ranks if _is_rank(rank)]:
        stage.broken.append(f"ranks {left} of {name} live without their leader")
    await stage.hold()
    await stage.back()


def rank_ids(leader: int) -> list[int]:
    """Return the process ids of the ranks that a worker's process has started, lowest first."""
    found: set[int] = set()
    for task in Path(f"/proc/{leader}/task").iterdir():
        found |= {int(child) for child in (task / "children").read_text().split()}
    return sorted(child for child in found if _is_rank(child))


def _is_rank(process: int) -> bool:
    """Return whether the process lives and is a rank."""
    try:
        return _MAIN in Path(f"/proc/{process}/cmdline").read_bytes()  # empty of a dead one
    except OSError:
        return False
