"""The spans of a request's trace, for a collector.

A trace that the sample ratio takes has spans of all processes, each its own; the router adds those
of its own phases, and of those that workers reported and export no span of. Of one that the ratio
leaves out the workers sent none: if it is worth keeping, the router exports it whole, from the
phases that the workers reported.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context

from baton.router.requests.request_trace import RequestTrace
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime.exposition.genai import PROVIDER, operation_name
from baton.runtime.telemetry import tracing
from baton.runtime.telemetry.timeline import Timeline, covered


def request_attributes(model: str, request: ValidatedRequest) -> dict[str, tracing.Attribute]:
    """Return what the request asks of the served `model`, by OpenTelemetry's conventions for
    generative AI (v0.1.0). Values that are off are left out, and so is all text of a client: stop
    sequences, messages and tools. The seed is the client's or, without one, the router's."""
    sampling = request.sampling
    found: dict[str, tracing.Attribute] = {
        "gen_ai.operation.name": operation_name(chat=request.chat),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.stream": request.stream,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed < 1 << 63:  # an attribute is a signed number of 64 bits
        found["gen_ai.request.seed"] = sampling.seed
    if request.choices != 1:
        found["gen_ai.request.choice.count"] = request.choices
    return found


def export_trace(
    trace: RequestTrace,
    root: Context,
    parent: Context,
    kept: list[str],
    end_wall_s: float,
    standard: Mapping[str, tracing.Attribute],
) -> None:
    """Export the spans of a request that has ended. `root` is the context of its own span, and
    `parent` that of its client; `standard` are the attributes of a request's span that is made
    only now, under their full names."""
    sampled = tracing.is_sampled(root)
    if not sampled and not kept:
        return
    if not sampled:
        root = tracing.export_root(
            tracing.REQUEST,
            (trace.begun_wall_s, end_wall_s),
            root,
            parent,
            standard,
            kept=",".join(kept),
        )
    wall_s = trace.begun_wall_s - trace.begun_s
    _export_phases(trace.path, wall_s, root, workers=not sampled, critical=True)
    if trace.after is not None:
        _export_phases(trace.after, wall_s, root, workers=not sampled, critical=False)
    if not sampled and trace.offers:
        _export_fetch(trace, root)


def _export_phases(
    timeline: Timeline, wall_s: float, root: Context, *, workers: bool, critical: bool
) -> None:
    """Export a span for each phase; without `workers` the workers have exported their own."""
    at_s = timeline.begun_s + wall_s
    for phase in timeline.phases:
        begin_s, at_s = at_s, at_s + phase.seconds
        name = phase.name.replace(" ", "_")
        if workers or not phase.where or name not in tracing.PHASES:
            extra: dict[str, str | int] = {"worker": phase.where} if phase.where else {}
            if phase.count:
                extra["blocks" if phase.name == "fetch" else "tokens"] = phase.count
            tracing.record(name, begin_s, at_s, root, critical=critical, **extra)


def _export_fetch(trace: RequestTrace, root: Context) -> None:
    """Export the spans of a fetch that the decode worker has not exported: of each offer, and of
    all of them, with the counts of the READs."""
    wall_s, offers = trace.begun_wall_s, trace.offers
    read_s = covered((each.begin_s, each.landed_s) for each in offers)
    handoff = tracing.record(
        tracing.HANDOFF,
        wall_s + min(each.begin_s for each in offers),
        wall_s + max(each.verified_s for each in offers),
        root,
        bytes=trace.read_bytes,
        reads=trace.reads,
        gb_per_s=tracing.gb_per_s(trace.read_bytes, read_s),
        transport=trace.transport,
    )
    for each in offers:
        tracing.record(
            tracing.FETCH,
            wall_s + each.begin_s,
            wall_s + each.verified_s,
            handoff,
            blocks=each.blocks,
            transport=trace.transport,
            landed_s=wall_s + each.landed_s,
            hidden=each.hidden_s >= each.verified_s - each.begin_s,
            hidden_s=each.hidden_s,
        )
