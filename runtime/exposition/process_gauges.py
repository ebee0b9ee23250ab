"""Sets several metrics at once: a process's role and memory, a pool, handoffs, a step."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping

from baton.runtime import handoff_metrics, metric_factory, metrics, process_memory


def set_pool_gauges(counts: Mapping[str, int], promised: int = 0) -> None:
    """Set the pool's gauges from its counts by state; other entries, as the total, are left.
    `promised`: blocks of credit that are not yet allocated."""
    for state in metric_factory.POOL_STATES:
        metrics.POOL_BLOCKS.labels(state).set(counts[state])
    blocks = sum(counts[state] for state in metric_factory.POOL_STATES)
    left = max(0, counts["free"] + counts["cached"] - promised)
    metrics.KV_USE.set(1 - left / blocks if blocks else 0.0)


def set_role(role: str) -> None:
    """Publish the role that this process has now."""
    for name in ("router", *metric_factory.ROLES):
        metrics.ROLE.labels(name).set(name == role)


def set_handoff_gauges(ages: Iterable[tuple[str, float]]) -> None:
    """Set the handoffs' gauges from the state and the age in seconds of each open handoff."""
    counts = dict.fromkeys(metric_factory.HANDOFF_STATES, 0)
    oldest = dict.fromkeys(metric_factory.HANDOFF_STATES, 0.0)
    for state, age_s in ages:
        counts[state] += 1
        oldest[state] = max(oldest[state], age_s)
    for state in metric_factory.HANDOFF_STATES:
        handoff_metrics.OPEN_HANDOFFS.labels(state).set(counts[state])
        handoff_metrics.OLDEST_HANDOFF_SECONDS.labels(state).set(oldest[state])


def show_step(role: str, device_s: float, slices: int, shortages: int) -> None:
    """Count a step of a worker."""
    metrics.STEP_SECONDS.labels(role).observe(device_s)
    metrics.STEP_SEQUENCES.observe(slices)
    metrics.MEMORY_SHORTAGES.inc(shortages)


def watch_process(loop: asyncio.AbstractEventLoop) -> None:
    """Make the process gauges read the tasks of its loop and its memory when they are scraped."""
    metrics.TASKS.set_function(lambda: len(asyncio.all_tasks(loop)))
    metrics.HEAP_BYTES.set_function(process_memory.allocated_bytes)
    metrics.PYTHON_BLOCKS.set_function(sys.getallocatedblocks)
