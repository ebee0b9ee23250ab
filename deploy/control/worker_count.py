"""How many workers an orchestrator was asked for, as it answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerCount:
    """The workers that were asked for, the version of what says so, and the worker that would leave
    first."""

    asked: int
    version: str
    last_id: str
