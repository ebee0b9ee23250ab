"""The advice that `baton advise --watch` posts: checked, bounded, and kept until it is old.

The router computes none of it. What is posted has counts, shares, seconds and sentences about the
fleet; the page shows each text as text. Owned by the event loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from baton.runtime.errors import InvalidRequest

MAX_BYTES = 64 << 10  # of a body
MAX_FINDINGS, MAX_RATIOS, MAX_ALTERNATIVES = 16, 3, 64
MAX_CHARACTERS = 600  # of a text
EXPIRES_S = 600.0  # on this router's clock, after it was posted
LEVELS = ("good", "notice", "bad")
TEXTS = ("kind", "change", "how")
TIMES = ("ttft_s", "ttft_p99_s", "gap_s", "gap_p99_s", "end_s", "good_share")
SHARES = ("low", "high")  # which may be null

Body = dict[str, Any]


class AdviceBoard:
    """`clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._posted: Body | None = None
        self._posted_s = 0.0

    def post(self, body: bytes) -> None:
        """Keep advice in place of what was there. Raises InvalidRequest, which names the field."""
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"the advice is not JSON: {error}", "body") from error
        self._posted, self._posted_s = _checked(found), self._clock()

    def shown(self) -> Body | None:
        """Return the advice, None without any or once it is EXPIRES_S old."""
        if self._posted is not None and self._clock() - self._posted_s > EXPIRES_S:
            self._posted = None
        return self._posted


def _checked(found: object) -> Body:
    """Return the known fields of advice, and nothing else of it."""
    values = _object(found, "body")
    findings = _list(values, "findings", MAX_FINDINGS)
    ratios = _list(values, "ratios", MAX_RATIOS)
    rows = _list(values, "alternatives", MAX_ALTERNATIVES)
    return {
        **{name: _number(values, name) for name in ("time", "requests", "window_s", "error")},
        "findings": [_finding(each) for each in findings],
        "ratios": [_ratio(each) for each in ratios],
        "alternatives": [_alternative(each) for each in rows],
    }


def _finding(found: object) -> Body:
    values = _object(found, "findings")
    if values.get("level") not in LEVELS:
        raise InvalidRequest(f"findings.level is not one of {', '.join(LEVELS)}", "findings")
    return {"level": values["level"], "text": _text(values, "text")}


def _ratio(found: object) -> Body:
    values = _object(found, "ratios")
    return {
        **{name: _text(values, name) for name in ("name", "obstacle")},
        "step": _number(values, "step"),
        **{name: _number_or_none(values, name) for name in ("good_share", "goodput_per_s")},
    }


def _alternative(found: object) -> Body:
    values = _object(found, "alternatives")
    return {
        **{name: _text(values, name) for name in TEXTS},
        **{name: _number(values, name) for name in TIMES},
        **{name: _number_or_none(values, name) for name in SHARES},
    }


def _object(found: object, field: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise InvalidRequest(f"{field} of the advice is no JSON object", field)
    return found


def _list(values: Mapping[str, Any], name: str, most: int) -> list[object]:
    found = values.get(name)
    if not isinstance(found, list) or len(found) > most:
        raise InvalidRequest(f"{name} of the advice is no list of at most {most}", name)
    return found


def _text(values: Mapping[str, Any], name: str) -> str:
    found = values.get(name)
    if not isinstance(found, str) or len(found) > MAX_CHARACTERS:
        raise InvalidRequest(f"{name} is no text of at most {MAX_CHARACTERS} characters", name)
    return found


def _number_or_none(values: Mapping[str, Any], name: str) -> float | None:
    return None if values.get(name) is None else _number(values, name)


def _number(values: Mapping[str, Any], name: str) -> float:
    found = values.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise InvalidRequest(f"{name} of the advice is no finite number", name)
    return found
