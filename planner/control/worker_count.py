"""How many workers an orchestrator was asked for, as it answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerCount:
    """The version of what says the number, and the ids of the workers that were asked for: the last
    one would leave first. The orchestrator takes no number below `least`."""

    version: str
    worker_ids: tuple[str, ...]
    least: int = 1

    @property
    def asked(self) -> int:
        return len(self.worker_ids)

    @property
    def last_id(self) -> str | None:
        """Return the worker that would leave first; None if none is asked for."""
        return self.worker_ids[-1] if self.worker_ids else None


def fleet_count(version: str, prefill: int, decode: int) -> WorkerCount:
    """Return the number of a fleet on Ray, whose workers `baton fleet` names. Its prefill workers
    stay, and one of the others."""
    names = [f"prefill-{number}" for number in range(prefill)]
    names += [f"decode-{number}" for number in range(decode)]
    return WorkerCount(version, tuple(names), least=prefill + 1)
