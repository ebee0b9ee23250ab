"""Patches that make runs on virtual time quick: no metric is counted, no task listed.

Each holds for the length of a run, of one loop at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from baton.simulation.virtual.virtual_loop import VirtualLoop

_COUNTING: dict[type, tuple[str, ...]] = {
    Counter: ("inc",),
    Gauge: ("inc", "dec", "set"),
    Histogram: ("observe",),
}


# asyncio's weak set of all tasks, under its name of Python 3.11 or a later one
_NAME = "_all_tasks" if hasattr(asyncio.tasks, "_all_tasks") else "_scheduled_tasks"
_LISTED: Any = getattr(asyncio.tasks, _NAME)


# callers that ask for the running loop; in Python 3.11 each answer is a call of the system
_ASKED: tuple[tuple[Any, str], ...] = (
    (asyncio, "get_running_loop"),
    (asyncio.events, "get_running_loop"),
    (asyncio.events, "_get_running_loop"),
)


@contextmanager
def known(loop: VirtualLoop) -> Iterator[None]:
    """There is no other loop at the same time."""
    before = [getattr(module, name) for module, name in _ASKED]
    for module, name in _ASKED:
        setattr(module, name, repeat(loop).__next__)
    try:
        yield
    finally:
        for (module, name), own in zip(_ASKED, before, strict=True):
            setattr(module, name, own)


@contextmanager
def uncounted() -> Iterator[None]:
    """No process reads the metrics of a simulated fleet, nor asks asyncio for all its tasks:
    counting takes a tenth of the time, and listing a twentieth."""
    _LISTED.add = bool  # the quickest that takes one argument and keeps nothing
    before = [(kind, dict(vars(kind))) for kind in _COUNTING]
    for kind, names in _COUNTING.items():
        for name in (*names, "labels"):
            setattr(kind, name, bool if name in names else _unlabelled)
    try:
        yield
    finally:
        del _LISTED.add
        for kind, own in before:
            for name in (*_COUNTING[kind], "labels"):
                if name in own:
                    setattr(kind, name, own[name])
                else:
                    delattr(kind, name)


def _unlabelled(metric: object, *_: str) -> object:
    return metric
