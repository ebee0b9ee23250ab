"""The worst bodies are what they are called: at the bounds, within them, and read to the end."""

from __future__ import annotations

import pytest

from baton.router.requests import request_parser
from baton.router.requests.openai_schema import MAX_MESSAGES, ChatRequest
from baton.router.requests.request_parser import check_counts, decode_body
from baton.runtime.config import RouterConfig
from baton.runtime.errors import InvalidRequest
from benchmarks import worst_bodies as worst


def test_each_is_as_large_as_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, less = RouterConfig().max_body_bytes, 2 * worst.SPARE
    assert len(worst.BODIES) == 6
    for name, (make, shape) in worst.BODIES.items():
        body = make()
        assert len(body) <= limit, name
        check_counts(shape.max_values, body)
        if shape is not ChatRequest:
            assert len(body) > limit - 200 or body.count(b",") > 1 << 19, name
            continue
        assert len(decode_body(body)["messages"]) == MAX_MESSAGES
        with monkeypatch.context() as lower, pytest.raises(InvalidRequest, match="body holds"):
            lower.setattr(request_parser, "MAX_STRINGS", request_parser.MAX_STRINGS - less)
            lower.setattr(request_parser, "MAX_CONTAINERS", request_parser.MAX_CONTAINERS - less)
            check_counts(shape.max_values - less, body)


def test_every_step_is_timed() -> None:
    make, shape = worst.BODIES["a chat of calls at all bounds"]
    steps = worst.read_once(make(), shape)
    turns = ["next", "decode_body", "parse_fields", "chat_constraint", "plain", "plain_tools"]
    assert list(steps) == turns
    assert all(ms > 0 for ms in steps.values())
    assert set(worst.hand_over(160)) == {"identities", "message"}


def test_each_step_is_reported_for_either_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = worst.BODIES["a million ids to detokenize"]
    monkeypatch.setattr(worst, "BODIES", {"ids": ids})
    monkeypatch.setattr(worst, "PLACED", (16,))
    rows = list(worst.measure(2))
    assert {row["heap"] for row in rows} == {"live", "set apart"}
    assert {row["step"] for row in rows if row["body"] == "ids"} >= {
        "decode_body",
        "parse_fields",
        "decode",
    }
    assert all(0 <= row["best_ms"] <= row["worst_ms"] for row in rows)
