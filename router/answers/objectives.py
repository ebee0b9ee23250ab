"""Counts how an ended request fared: its objectives, its tokens, and the conventional metrics.

Called once a request, so that a token costs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.runtime import metrics
from baton.runtime.cluster_config import SloConfig
from baton.runtime.exposition import genai
from baton.runtime.exposition.genai import RequestTimes
from baton.runtime.telemetry.timeline import Phase

# Phases before the first token, as vLLM divides them: before the first chunk was scheduled, and
# from then on. What messages take is in neither. What was lost, and what a worker READ instead of
# computing it, passed before a chunk too.
QUEUED = frozenset(
    {"place", "credit wait", "prefill queue", "lost handoff", "lost attempt", "cached read"}
)
PREFILLED = frozenset({"step wait", "chunk", "first token"})


@dataclass(frozen=True, slots=True)
class Scorekeeper:
    """The objectives of a router and the model that it serves."""

    model: str = ""
    slo: SloConfig = SloConfig()

    def record(
        self,
        times: RequestTimes,
        tokens: int,
        *,
        chat: bool,
        error_type: str | None = None,
        phases: Iterable[Phase] = (),
    ) -> None:
        """Count an ended request with `tokens` of output. `error_type` is the class of its error:
        None if it finished. `phases` are those of its critical path."""
        genai.record(genai.operation_name(chat=chat), self.model, times, error_type)
        metrics.OUTPUT_TOKENS.observe(tokens)
        outcome = judged(self.slo, times) if error_type is None else "failed"
        metrics.OBJECTIVES.labels(outcome).inc()
        if outcome == "met":
            metrics.GOODPUT_TOKENS.inc(tokens)
        if error_type is None and times.first_token_s is not None:
            _observe_parts(list(phases), times.duration_s - times.first_token_s)


def _observe_parts(phases: list[Phase], decode_s: float) -> None:
    queue_s = sum(phase.seconds for phase in phases if phase.name in QUEUED)
    prefill_s = sum(phase.seconds for phase in phases if phase.name in PREFILLED)
    metrics.REQUEST_QUEUE_SECONDS.observe(queue_s)
    metrics.REQUEST_PREFILL_SECONDS.observe(prefill_s)
    metrics.REQUEST_DECODE_SECONDS.observe(decode_s)
    metrics.REQUEST_INFERENCE_SECONDS.observe(prefill_s + decode_s)


def judged(slo: SloConfig, times: RequestTimes) -> str:
    """Return what a finished request missed. One without a second token has no ITL to miss."""
    late = _over(times.first_token_s, slo.ttft_s)
    slow = _over(times.per_token_s, slo.itl_s)
    if late and slow:
        return "both_missed"
    if late:
        return "ttft_missed"
    return "itl_missed" if slow else "met"


def _over(seconds: float | None, objective_s: float) -> bool:
    return seconds is not None and 0 < objective_s < seconds
