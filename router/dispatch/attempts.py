"""An index of all attempts of a router: by id on the wire, by request and by link.

    add ─▶ assign(link) ─▶ assign(None) ─▶ assign(another) ... ─▶ remove

What one client or one worker ends then costs a look at its own attempts, not at all of them. An
attempt is on a link from the message that submits it until it is removed or assigned elsewhere.
Owned by the dispatcher, which alone changes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import TypeVar

from baton.router.dispatch.active_request import ActiveRequest
from baton.router.dispatch.attempt import Attempt
from baton.router.fleet.worker_link import WorkerLink

_Key = TypeVar("_Key")


class Attempts:
    """Lists are in the order in which their attempts were added."""

    def __init__(self) -> None:
        self._by_id: dict[str, Attempt] = {}
        self._by_active_request: dict[ActiveRequest, dict[Attempt, int]] = {}
        self._by_link: dict[WorkerLink, dict[Attempt, int]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, wire_id: str) -> bool:
        return wire_id in self._by_id

    def get(self, wire_id: str) -> Attempt | None:
        return self._by_id.get(wire_id)

    def values(self) -> Collection[Attempt]:
        return self._by_id.values()

    def add(self, attempt: Attempt) -> None:
        """Add an attempt that is on no link; its id is free."""
        self._by_id[attempt.wire_id] = attempt
        siblings = self._by_active_request.setdefault(attempt.active_request, {})
        siblings[attempt] = next(self._numbers)

    def remove(self, wire_id: str) -> None:
        """Remove the attempt that has this id, if there is one."""
        attempt = self._by_id.pop(wire_id, None)
        if attempt is not None:
            _drop(self._by_active_request, attempt.active_request, attempt)
            if attempt.link is not None:
                _drop(self._by_link, attempt.link, attempt)

    def assign(self, attempt: Attempt, link: WorkerLink | None) -> None:
        """Note which link an attempt is on now."""
        if attempt.link is not None:
            _drop(self._by_link, attempt.link, attempt)
        attempt.link = link
        number = self._by_active_request.get(attempt.active_request, {}).get(attempt)
        if link is not None and number is not None:  # else it has been removed
            self._by_link.setdefault(link, {})[attempt] = number

    def of(self, active_request: ActiveRequest) -> list[Attempt]:
        return [*self._by_active_request.get(active_request, ())]

    def on(self, link: WorkerLink) -> list[Attempt]:
        found = self._by_link.get(link, {})
        return sorted(found, key=found.__getitem__)


def _drop(index: dict[_Key, dict[Attempt, int]], key: _Key, attempt: Attempt) -> None:
    found = index.get(key)
    if found is not None:
        found.pop(attempt, None)
        if not found:
            del index[key]
