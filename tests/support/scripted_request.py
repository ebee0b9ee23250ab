"""A request as a decode worker's intake hands it to the scheduler, with no client behind it.

What the scheduler, the waiting line and the credit are held against: neutral but for what a test
changes. Its outputs go nowhere; its creator owns it.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.context import Context

from baton.decode_worker.sequences import Request, Sequence
from baton.proto import worker_pb2
from baton.runtime.sampling import SamplingParams


def scripted_request(prompt: list[int], *, n: int = 1, at_s: float = 0.0, **fields: Any) -> Request:
    """A request of `n` choices, arrived at `at_s`; `fields` are those of Request that differ."""
    neutral: dict[str, Any] = {
        "request_id": f"r{at_s}",
        "attempt": 1,
        "sampling": SamplingParams(),
        "wire_sampling": worker_pb2.Sampling(),
        "max_tokens": 16,
        "stop_token_ids": frozenset(),
        "local": True,
        "candidates": [],
        "cache_salt": b"",
        "root": b"root",
        "trace": Context(),
        "emit": lambda output: None,
    }
    made = Request(prompt=prompt, arrived_s=at_s, arrived_wall_s=at_s, **{**neutral, **fields})
    made.sequences = [Sequence(made, choice, []) for choice in range(n)]
    return made
