"""All submissions of a router: by their ids on the wire, of each request, and on each link.

    add ─▶ assign(link) ─▶ assign(None) ─▶ assign(another) ... ─▶ remove

So what one client, or one worker, ends costs its own submissions and not all of them. A submission
is on a link from the message that submits it until it is taken off or removed. Owned by the
dispatcher, which shares it with the placer and the moves.
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
    """Each list is in the order in which its submissions were added."""

    def __init__(self) -> None:
        self._by_id: dict[str, Attempt] = {}
        self._by_generation: dict[ActiveRequest, dict[Attempt, int]] = {}
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

    def add(self, submission: Attempt) -> None:
        """Add a submission that is on no link; its id is free."""
        self._by_id[submission.wire_id] = submission
        mates = self._by_generation.setdefault(submission.generation, {})
        mates[submission] = next(self._numbers)

    def remove(self, wire_id: str) -> None:
        """Remove what has this id, if anything has."""
        submission = self._by_id.pop(wire_id, None)
        if submission is not None:
            _drop(self._by_generation, submission.generation, submission)
            if submission.link is not None:
                _drop(self._by_link, submission.link, submission)

    def assign(self, submission: Attempt, link: WorkerLink | None) -> None:
        """Note which link a submission is on now."""
        if submission.link is not None:
            _drop(self._by_link, submission.link, submission)
        submission.link = link
        number = self._by_generation.get(submission.generation, {}).get(submission)
        if link is not None and number is not None:  # else it has been removed
            self._by_link.setdefault(link, {})[submission] = number

    def of(self, generation: ActiveRequest) -> list[Attempt]:
        return [*self._by_generation.get(generation, ())]

    def on(self, link: WorkerLink) -> list[Attempt]:
        found = self._by_link.get(link, {})
        return sorted(found, key=found.__getitem__)


def _drop(index: dict[_Key, dict[Attempt, int]], key: _Key, submission: Attempt) -> None:
    found = index.get(key)
    if found is not None:
        found.pop(submission, None)
        if not found:
            del index[key]
