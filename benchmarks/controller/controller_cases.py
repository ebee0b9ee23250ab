"""The patterns of traffic, and the fleets that serve them. Timings are those of vLLM on H200 by
aiconfigurator's published points, fitted by `baton calibrate`."""

from __future__ import annotations

from dataclasses import dataclass

from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    StepTiming,
    TimingModel,
    TransferTiming,
)
from baton.planner.traffic_patterns import Pattern, burst, daily, sine
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives

PREFILL_SCALE = 1.06  # three prefill workers saturate at 4.5 requests a second of this trace
LLAMA = TimingModel(
    "Llama 3.1 70B, four H200",
    163_840,
    ChunkTiming(0.036 * PREFILL_SCALE, 5.28e-5 * PREFILL_SCALE),
    StepTiming(0.0094, 1.64e-5),
    AttentionTiming(0.0, 4.24e-8),
    TransferTiming(0.002, 1 / 50e9),
)
GPT_OSS = TimingModel(
    "gpt-oss-120b, one H200",
    73_728,
    ChunkTiming(0.0431, 4.45e-5),
    StepTiming(0.0055, 2.55e-4),
    AttentionTiming(0.0, 2.76e-8),
    TransferTiming(0.002, 1 / 50e9),
)


@dataclass(frozen=True, slots=True)
class ControllerCase:
    """One pattern on a fleet that begins with `prefill` of `workers` as prefill workers."""

    pattern: Pattern
    timing: TimingModel
    workers: int
    prefill: int
    objectives: Objectives

    def scenario(self, prefill: int) -> CapacityScenario:
        layout = Layout(prefill=prefill, decode=self.workers - prefill)
        return CapacityScenario(layout, self.objectives)


def cases(scale: float) -> list[ControllerCase]:
    """Return the patterns; `scale` shortens them."""
    llama = (LLAMA, 12, 3, Objectives(5.0, 0.025))
    period_s = 900 * scale
    heavy_s = period_s * 2 / 3
    mix = burst(0.0, 1.0, period_s, heavy_s)
    rates = burst(15.0, 3.8, period_s, heavy_s)
    step_up = burst(3.0, 8.0, 300.0, 240.0)
    bursts = burst(3.0, 8.0, 600 * scale, 240 * scale)
    return [
        ControllerCase(Pattern("saturating", 300.0, step_up, 8.0), *llama),
        ControllerCase(Pattern("sine", 1200 * scale, sine(1.5, 8.0, 600 * scale), 8.0), *llama),
        ControllerCase(Pattern("burst", 1200 * scale, bursts, 8.0), *llama),
        ControllerCase(Pattern("daily", 1200 * scale, daily(1.0, 8.0, 1200 * scale), 8.0), *llama),
        ControllerCase(
            Pattern("shifting", 2 * period_s, rates, 15.0, mix),
            GPT_OSS,
            8,
            4,
            Objectives(8.0, 0.013),
        ),
    ]
