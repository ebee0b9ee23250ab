"""The work that one boot of a worker has done, as counters: the role controller reads them with the
worker's status, and takes rates from their increments. Owned by the worker's loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WorkCounts:
    """Counters since the boot's start. `requests` and `ended_requests` are choices of requests on a
    decode worker, prompts on a prefill worker."""

    requests: int = 0
    ended_requests: int = 0
    ended_output_tokens: int = 0  # of these
    prompt_tokens: int = 0  # computed here
    output_tokens: int = 0  # drawn in steps
