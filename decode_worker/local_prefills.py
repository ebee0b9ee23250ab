"""Metrics and spans of prompts that a decode worker computes by itself.

Their spans are a prefill worker's, with the reason in `local`: the request was placed so, no
prefill worker was left, or it was preempted and is computed again. Times are seconds of
time.time(). Knows groups and chunks; the worker's loop calls it.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.decode_worker.sequences import Group
from baton.engine.scheduling.chunks import Chunk
from baton.runtime import metrics, tracing


def record_start(group: Group, wall_s: float) -> None:
    """Record that the group's prompt has its blocks and will be computed here."""
    group.prefill_wall_s = wall_s
    metrics.LOCAL_PREFILLS.labels(group.local).inc()


def record_chunks(
    chunks: Iterable[Chunk[Group]], started_wall_s: float, ended_wall_s: float, block_size: int
) -> None:
    """Record the chunks that a step has computed."""
    for chunk in chunks:
        group, trace, local = chunk.key, chunk.key.request.trace, str(chunk.key.local)
        recomputed = max(0, min(chunk.end, group.recomputed_tokens) - chunk.start)
        metrics.TOKENS.labels("recomputed").inc(recomputed)
        metrics.TOKENS.labels("prompt").inc(chunk.end - chunk.start - recomputed)
        span = {"start": chunk.start, "end": chunk.end}
        tracing.record(tracing.CHUNK, started_wall_s, ended_wall_s, trace, **span, local=local)
        if chunk.last:
            cached, start_s = group.held * block_size, group.prefill_wall_s
            tracing.record(
                tracing.PREFILL, start_s, ended_wall_s, trace, cached_tokens=cached, local=local
            )
