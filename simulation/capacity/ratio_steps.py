"""Goodput of a fleet as it is and with one worker moved to the other role, from its advice.

    step -1   one prefill worker decodes        step +1   one decode worker prefills

Pure; simulates nothing: both neighbours are among the changes that advice has simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.simulation.capacity.layout import Layout
from baton.simulation.capacity.live_advice import FleetAdvice

STEPS = (-1, 0, 1)


@dataclass(frozen=True, slots=True)
class RatioStep:
    """`good_share` of the requests met the objectives; None where no such fleet exists, for the
    reason `obstacle`."""

    step: int
    name: str
    good_share: float | None = None
    obstacle: str = ""


def ratio_steps(advice: FleetAdvice) -> list[RatioStep]:
    """Return the three steps in their order."""
    return [_step(advice, step) for step in STEPS]


def _step(advice: FleetAdvice, step: int) -> RatioStep:
    now = advice.now.change.layout
    if not step:
        return RatioStep(0, now.name, advice.now.times.good_share)
    if now.colocated:
        return RatioStep(step, "", obstacle="each worker prefills and decodes")
    for each in advice.alternatives:
        if each.change.kind == "order" and _ratio(each.change.layout) == (
            now.prefill + step,
            now.decode - step,
        ):
            return RatioStep(step, each.change.layout.name, each.times.good_share)
    return RatioStep(
        step, "", obstacle=f"the only {'decode' if step > 0 else 'prefill'} worker stays"
    )


def _ratio(layout: Layout) -> tuple[int, int]:
    return layout.prefill, layout.decode
