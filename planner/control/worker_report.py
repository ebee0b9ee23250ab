"""A worker's report as the controller takes it: the counters of its audit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from baton.planner.controller_load import RouterSample, WorkerSample, WorkerState
from baton.planner.step_samples import StepLimits, step_sample
from baton.runtime.registry import WorkerRecord
from baton.runtime.worker.kv_bridge import is_narrow

ANSWER_TIMEOUT_S = 2.0  # a worker without an answer until then counts as unreachable


class ReportedRouter(Protocol):
    """A router as a worker reports it; see `RouterSample`."""

    @property
    def router_id(self) -> str: ...

    @property
    def waiting(self) -> int: ...

    @property
    def refused(self) -> int: ...


def counted(
    record: WorkerRecord,
    audit: Mapping[str, Any],
    not_ready: str,
    routers: Iterable[ReportedRouter] = (),
) -> WorkerSample:
    """Return the report of a boot. `not_ready` says why it is not; empty: it is. Raises
    LookupError, TypeError, ValueError or AttributeError for an audit of any other form."""
    work, blocks = audit["work"], audit["blocks"]
    size = int(work["block_tokens"])
    state: WorkerState = "not ready" if not_ready else "ready"
    return WorkerSample(
        worker_id=record.worker_id,
        boot_id=record.boot_id,
        role=record.role,
        state="draining" if audit["draining"] else state,
        waiting=audit["waiting"],
        running=audit["running"],
        queued_tokens=int(work["queued_tokens"]),
        kv_used_tokens=blocks["used"] * size,
        kv_tokens=blocks["total"] * size,
        requests=work["requests"],
        ended_requests=work["ended_requests"],
        ended_output_tokens=work["ended_output_tokens"],
        prompt_tokens=work["prompt_tokens"],
        output_tokens=work["output_tokens"],
        busy_s=work["busy_s"],
        steps=int(work["steps"]),
        block_tokens=size,
        recent_steps=tuple(step_sample(row) for row in work.get("recent_steps", ())),
        verifying_steps=work.get("verifying_steps", 0),
        narrow_kv=is_narrow(work.get("kv_dtype", "")),
        step_limits=StepLimits(**work["step_limits"]) if "step_limits" in work else None,
        routers=tuple(RouterSample(each.router_id, each.waiting, each.refused) for each in routers),
    )
