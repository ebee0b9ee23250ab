"""The sizes of a request, and which workers they fit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.router.fleet.worker_view import NumericsId, WorkerCapacity, WorkerView
from baton.runtime.errors import BatonError, InvalidRequest, Unavailable


@dataclass(frozen=True, slots=True)
class Need:
    """The sizes of a request: prompt and accepted tokens, the output that is expected beyond them
    (`StepConfig.expected_growth_tokens` at most), and `most_tokens`, the prompt with all output
    that a sequence may have. A decode worker counts the same numbers. `numerics` is that of the
    worker that drew the accepted tokens, None without accepted tokens: a worker with another one
    would continue another answer."""

    tokens: int
    output_tokens: int
    most_tokens: int
    sequences: int = 1
    avoid: frozenset[bytes] = frozenset()  # boot ids that failed this request: the last choice
    left: frozenset[bytes] = frozenset()  # boot ids of prefill workers that no longer existed
    numerics: NumericsId | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A worker of either role that holds the `blocks` leading blocks of a prompt."""

    worker: WorkerView
    blocks: int


def uncached_tokens(need: Need, held_blocks: int, worker: WorkerCapacity) -> int:
    """Return the tokens that the worker has to compute; the last prompt token is always one."""
    return need.tokens - min(held_blocks * worker.block_size, need.tokens - 1)


def holds(need: Need, worker: WorkerCapacity) -> bool:
    """Return whether a decode worker could ever take the request. Counts like the worker's own
    queue: the longest that one sequence may become, and the credit of all sequences."""
    size = worker.block_size
    grown = _blocks(need.tokens + need.output_tokens, size)
    credit = grown + (need.sequences - 1) * (grown - need.tokens // size)  # full blocks are shared
    wanted = max(credit, _blocks(need.most_tokens, size))
    return wanted <= worker.total_blocks and need.most_tokens <= worker.max_context


def computes(need: Need, worker: WorkerCapacity, targets: int) -> bool:
    """Return whether a prefill worker has room for all of the tokens, and for `targets` blocks to
    convert each of theirs."""
    blocks = _blocks(need.tokens, worker.block_size) * (1 + targets)
    return blocks <= worker.total_blocks and need.tokens <= worker.max_context


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def too_large(need: Need, decoders: Sequence[WorkerCapacity]) -> BatonError:
    if any(holds(need, worker) for worker in decoders):
        return Unavailable(
            "no decode worker whose KV pool is large enough takes work now: send the request again"
        )
    largest = max(min(e.total_blocks * e.block_size, e.max_context) for e in decoders)
    asked = f"of {need.most_tokens} tokens of prompt and output"
    if need.sequences > 1:
        asked = f"of {need.sequences} choices {asked} each"
    return InvalidRequest(
        f"a request {asked} does not fit the largest KV pool ({largest} tokens): shorten the "
        "prompt, lower max_tokens or n, or start a worker with a larger pool",
        "prompt" if need.tokens >= largest else "max_tokens",
    )
