"""A worker that computes, but slowly: stopped and let go on ten times a second, it has a tenth of
its time. Each stop is far shorter than any silence that would end a link.

How slow it was is seen in its own steps, beside those of its fellows at the same time; whether
routers passed it over, by their circuits. That it was not much slower makes it void.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass
from statistics import median

from chaos.cluster import Cluster
from chaos.stage import Stage

STOPPED_S, RUNS_S = 0.09, 0.01
POLL_S = 0.2
SLOWER_AT_LEAST = 5.0  # times as slow: with which a router's circuit opens


@dataclass(frozen=True, slots=True)
class Steps:
    """That a worker has ended since its start."""

    count: float
    seconds: float

    def mean_s(self, since: Steps) -> float:
        """0 where none has ended since."""
        count = self.count - since.count
        return (self.seconds - since.seconds) / count if count else 0.0


async def slow(stage: Stage, name: str) -> None:
    """Slow a worker for as long as faults last. Its steps count until every router passes it over:
    afterwards they are its own probes, of one token."""
    cluster = stage.cluster
    names, routers = stage.named(name.split("-")[0]), len(stage.named("router"))
    began = {each: await stage.do(_steps, cluster, each) for each in names}
    before, opened = await _opened(stage), 0.0
    slowing = asyncio.create_task(stage.do(_stop_and_go, cluster, name, stage.hold_s))
    while not slowing.done() and opened < routers:
        await asyncio.wait({slowing}, timeout=POLL_S)
        opened = await _opened(stage) - before
    means = {each: (await stage.do(_steps, cluster, each)).mean_s(began[each]) for each in names}
    await slowing
    slow_s, usual_s = means.pop(name), median(means.values())
    stage.notes.append(
        f"its steps took {1000 * slow_s:.0f} ms, its fellows' {1000 * usual_s:.0f} ms; "
        f"{opened:.0f} of {routers} routers opened its circuit"
    )
    stage.void = not_slow(usual_s, slow_s)
    await stage.whole()


def not_slow(usual_s: float, slow_s: float) -> str | None:
    """Return why it shows nothing of a slow worker, None where it does."""
    if not usual_s or not slow_s:
        return "it, or its fellows, computed nothing in that time"
    if slow_s < SLOWER_AT_LEAST * usual_s:
        return f"it was only {slow_s / usual_s:.1f} times as slow"
    return None


def _stop_and_go(cluster: Cluster, name: str, for_s: float) -> None:
    """Stop and resume a worker, in a thread: its sleeps are the fault, and hold up nothing else."""
    until_s = time.monotonic() + for_s
    try:
        while time.monotonic() < until_s:
            cluster.kill(name, signal.SIGSTOP)
            time.sleep(STOPPED_S)  # The stop is the fault.
            cluster.kill(name, signal.SIGCONT)
            # The run between two stops is the fault.
            time.sleep(RUNS_S)
    finally:
        cluster.kill(name, signal.SIGCONT)


def _steps(cluster: Cluster, name: str) -> Steps:
    role = name.split("-")[0]
    return Steps(
        cluster.metric(name, "baton_step_seconds_count", role=role),
        cluster.metric(name, "baton_step_seconds_sum", role=role),
    )


async def _opened(stage: Stage) -> float:
    """Circuits of slow workers, of all routers."""

    def look() -> float:
        metric = "baton_circuits_opened_total"
        routers = stage.named("router")
        return sum(stage.cluster.metric(router, metric, reason="slow") for router in routers)

    found: float = await stage.do(look)
    return found
