"""Prompts that a decode worker computes by itself: counted by why, and told in their traces.

Their spans are a prefill worker's, with `local` to say why they were recorded here: the request
was placed so, no prefill worker was left, or it was preempted and is computed again. Times are
seconds of time.time(). Knows groups and chunks; the worker's loop calls it.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.decode_worker.sequences import Group
from baton.engine.scheduling.chunks import Chunk
from baton.runtime import metrics, tracing


def begun(group: Group, wall_s: float) -> None:
    """The group's prompt has its blocks, and is computed from now on."""
    group.prefill_wall_s = wall_s
    metrics.LOCAL_PREFILLS.labels(group.local).inc()


def computed(
    chunks: Iterable[Chunk[Group]], started_wall_s: float, ended_wall_s: float, block_size: int
) -> None:
    """A step has computed these chunks."""
    for chunk in chunks:
        group, trace, local = chunk.key, chunk.key.request.trace, str(chunk.key.local)
        again = max(0, min(chunk.end, group.again) - chunk.start)
        metrics.TOKENS.labels("recomputed").inc(again)
        metrics.TOKENS.labels("prompt").inc(chunk.end - chunk.start - again)
        place = {"start": chunk.start, "end": chunk.end}
        tracing.record(tracing.CHUNK, started_wall_s, ended_wall_s, trace, **place, local=local)
        if chunk.last:
            cached, start_s = group.held * block_size, group.prefill_wall_s
            tracing.record(
                tracing.PREFILL, start_s, ended_wall_s, trace, cached_tokens=cached, local=local
            )
