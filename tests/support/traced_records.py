"""Records of traces as a router writes them, for tests of planners."""

from __future__ import annotations

from typing import Any

from baton.planner.timing_model import TimingModel
from baton.planner.traces import TraceRequest
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario


def record(
    time_s: float = 0.0, ttft_ms: float = 100.0, total_ms: float = 200.0, **fields: Any
) -> dict[str, Any]:
    """Return the record of a request of 64 prompt and 11 output tokens."""
    path = [["receive", 1000, 0, ""], ["credit wait", 20_000, 0, "d0"]]
    path += [["prefill queue", 30_000, 0, "p0"], ["chunk", 40_000, 64, "p0"]]
    return {
        "outcome": "finished",
        "time": time_s,
        "after_us": round(1000 * ttft_ms),
        "total_s": total_ms / 1000,
        "prompt_tokens": 64,
        "output_tokens": 11,
        "cached_tokens": 0,
        "migrations": 0,
        "path": path,
        "offers": [],
        "read_bytes": 0,
        **fields,
    }


def simulated_records(
    scenario: CapacityScenario, timing: TimingModel, traffic: list[TraceRequest]
) -> list[dict[str, Any]]:
    """Return the records of a fleet that takes exactly the simulated times."""
    found = []
    for each in run_fleet(scenario, timing, traffic).records:
        path = [["prefill queue", round(1e6 * each.ttft_s), 0, "p0"]]
        total_ms = 1000 * (each.end_s - each.request.arrived_s)
        sizes: dict[str, Any] = {
            "prompt_tokens": each.request.prompt_tokens,
            "output_tokens": each.request.output_tokens,
        }
        if each.request.blocks:
            names = b"".join([(2 * name).to_bytes(8, "big") for name in each.request.blocks])
            sizes["prompt_blocks"] = [each.request.block_tokens, names.hex()]
        arrived_s = 1e6 + each.request.arrived_s
        found.append(record(arrived_s, 1000 * each.ttft_s, total_ms, path=path, **sizes))
    return found
