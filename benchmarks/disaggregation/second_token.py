"""Where the time between first and second token goes, from the router's trace records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TRANSFER = ("fetch", "verify")


@dataclass(frozen=True, slots=True)
class SecondToken:
    """Seconds after the first token. `transfer_s`: fetch and verification that prefill did not
    hide; `queue_s`: until a step began that had the sequence; `step_s`: that step; `way_s`: the
    messages between router and worker."""

    transfer_s: float
    queue_s: float
    step_s: float
    way_s: float

    @property
    def own_s(self) -> float:
        """Return the gap without the transfer."""
        return self.queue_s + self.step_s + self.way_s


def second_tokens(records: Sequence[Mapping[str, Any]]) -> list[SecondToken]:
    """Return those of the requests whose KV moved and that nothing interrupted."""
    return [
        _of(record["after"])
        for record in records
        if record["offers"] and not record["preempted"] and not record["migrations"]
    ]


def _of(phases: Sequence[Sequence[Any]]) -> SecondToken:
    seconds = {"transfer": 0.0, "decode queue": 0.0, "step": 0.0, "way": 0.0}
    for name, micros, *_ in phases:
        key = "transfer" if name in TRANSFER else name if name in seconds else "way"
        seconds[key] += micros / 1e6
    return SecondToken(
        seconds["transfer"], seconds["decode queue"], seconds["step"], seconds["way"]
    )
