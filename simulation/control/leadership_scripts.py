"""The scripts of the controllers' leadership, as a simulated Redis server runs them.

The server drops what has expired before it runs one. Pure, but for the values.
"""

from __future__ import annotations

import math

from baton.planner.control.leadership import (
    NEXT_TERM_SCRIPT,
    RELEASE_SCRIPT,
    RENEW_SCRIPT,
    STORE_SCRIPT,
)
from baton.simulation.virtual.simulated_redis import EPOCH_S, Script, Values


def _renew(values: Values, now_s: float, keys: list[bytes], arguments: list[bytes]) -> int:
    holder, lasts_ms = arguments
    if not _holds(values, keys[0], holder):
        return 0
    values[keys[0]] = (holder, now_s + int(lasts_ms) / 1000)
    return 1


def _next_term(values: Values, now_s: float, keys: list[bytes], arguments: list[bytes]) -> bytes:
    last = int(values[keys[0]][0]) if keys[0] in values else 0
    term = b"%d" % max(last + 1, int(EPOCH_S + now_s))
    values[keys[0]] = (term, math.inf)
    return term


def _store(values: Values, now_s: float, keys: list[bytes], arguments: list[bytes]) -> int:
    holder, text, lasts_s = arguments
    if not _holds(values, keys[0], holder):
        return 0
    values[keys[1]] = (text, now_s + int(lasts_s))
    return 1


def _release(values: Values, now_s: float, keys: list[bytes], arguments: list[bytes]) -> int:
    if not _holds(values, keys[0], arguments[0]):
        return 0
    del values[keys[0]]
    return 1


def _holds(values: Values, key: bytes, holder: bytes) -> bool:
    return key in values and values[key][0] == holder


LEADERSHIP_SCRIPTS = {
    RENEW_SCRIPT: Script(_renew, stores=False),
    NEXT_TERM_SCRIPT: Script(_next_term, stores=True),
    STORE_SCRIPT: Script(_store, stores=True),
    RELEASE_SCRIPT: Script(_release, stores=False),
}
