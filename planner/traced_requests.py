"""Requests as a router's traces have them: their sizes, their times, and the causes of their TTFT.

    path    receive ... place │ credit wait │ prefill queue, step wait │ chunk │ the rest
            router, messages    KV room       the wait for a step        computation

The time to the first token ends where that token reached the router (`after_us`), streamed or not.
Traces name the blocks of prompts, so a simulation finds its own prefix hits; what was cached before
the first of these requests counts as cached by every worker. Where a trace names none, all prompts
count with the tokens that were computed, so prefix hits stay as they were. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.planner.timing_fit import TimingSample
from baton.planner.traces import BLOCK_TOKENS, TraceRequest, in_order
from baton.runtime.errors import ConfigError

CAUSES = ("credit", "queue", "compute", "cached read", "rest")
_CAUSE_OF = {
    "credit wait": "credit",
    "prefill queue": "queue",
    "step wait": "queue",
    "chunk": "compute",
    "cached read": "cached read",
}
NAME_BYTES = 8  # of a block's name in a trace
MIN_TRANSFER_S = 1e-6


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request that finished. Seconds; `mean_gap_s` is 0 with a single token. `causes` add up to
    the TTFT. `transfers` are (bytes, seconds) of its offers."""

    begun_wall_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_s: float
    mean_gap_s: float
    causes: Mapping[str, float]
    migrated: bool
    read_bytes: int
    read_blocks: int
    transfers: tuple[tuple[float, float], ...]
    named_tokens: int = 0  # that each of `block_names` stands for; 0: none was recorded
    block_names: bytes = b""

    @property
    def computed_tokens(self) -> int:
        """Return the prompt tokens that were computed, at least one."""
        return max(1, self.prompt_tokens - self.cached_tokens)


def traced_requests(records: Iterable[Mapping[str, Any]]) -> list[TracedRequest]:
    """Return the requests that finished with a token, in order of arrival. Raises ConfigError where
    a record is not of this version's form."""
    try:
        found = [_traced(each) for each in records if _answered(each)]
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"a trace of the router is not of this version's form ({error!r}): use the same "
            "version of Baton for the router and for this command"
        ) from error
    return sorted(found, key=lambda each: each.begun_wall_s)


def traffic_of(requests: Sequence[TracedRequest]) -> list[TraceRequest]:
    """Return the requests as traffic to simulate, in order of arrival, the first at 0."""
    if (size := common_block_tokens(requests)) is not None:
        return in_order(_with_blocks(requests, size))
    return in_order(
        TraceRequest(each.begun_wall_s, each.computed_tokens, each.output_tokens)
        for each in requests
    )


def common_block_tokens(requests: Sequence[TracedRequest]) -> int | None:
    """Return the tokens of a block by which all prompts can be compared; None if the traces do not
    allow it. A prompt that has no whole block has none to name."""
    sizes = [each.named_tokens for each in requests if each.block_names]
    unnamed = [each for each in requests if not each.block_names]
    size = max(sizes, default=0)
    usable = 0 < size <= BLOCK_TOKENS and all(not each & (each - 1) for each in sizes)
    return size if usable and all(each.prompt_tokens < size for each in unnamed) else None


def _with_blocks(requests: Sequence[TracedRequest], size: int) -> Iterator[TraceRequest]:
    """Yield the requests with the names of blocks of `size` tokens, without leading blocks that
    were cached and that no request before had: they were cached before."""
    before, seen = set[int](), set[int]()
    for each in requests:
        names, held, first = _names(each, size), each.cached_tokens // size, 0
        for name in names:
            if name not in before:
                if name in seen or first >= held:
                    break
                before.add(name)
            first += 1
        seen.update(names[first:])
        tokens = max(1, each.prompt_tokens - first * size)
        blocks = tuple(names[first:])[: -(-tokens // size)]
        yield TraceRequest(each.begun_wall_s, tokens, each.output_tokens, blocks, size)


def _names(request: TracedRequest, size: int) -> list[int]:
    """Return the names of the prompt's whole blocks: each names the prefix up to its end."""
    if not request.block_names:
        return []
    width, step = NAME_BYTES, size // request.named_tokens
    found = [
        int.from_bytes(request.block_names[at : at + width], "big") >> 1
        for at in range(0, len(request.block_names), width)
    ]
    return found[step - 1 :: step][: request.prompt_tokens // size]


def transfer_samples(requests: Iterable[TracedRequest]) -> list[TimingSample]:
    """Return the READs of their offers as samples of a timing model."""
    return [
        TimingSample("transfer", (size,), seconds)
        for each in requests
        for size, seconds in each.transfers
    ]


def host_samples(requests: Iterable[TracedRequest]) -> list[TimingSample]:
    """Return what is left of each TTFT without waits and computation: router and messages."""
    return [
        TimingSample("host", (float(each.prompt_tokens),), each.causes["rest"])
        for each in requests
        if each.causes["rest"] > 0 and not each.migrated
    ]


def kv_bytes_per_token(requests: Iterable[TracedRequest], block_tokens: int) -> float:
    """Return the bytes of a token's KV by the blocks that were READ; 0 if none was."""
    found = [(each.read_bytes, each.read_blocks) for each in requests if each.read_blocks]
    size, blocks = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0)
    return size / (blocks * block_tokens) if blocks else 0.0


def _answered(record: Mapping[str, Any]) -> bool:
    finished = record["outcome"] == "finished" and record["after_us"] > 0
    return bool(finished and record["output_tokens"])


def _traced(record: Mapping[str, Any]) -> TracedRequest:
    ttft_s, tokens = record["after_us"] / 1e6, int(record["output_tokens"])
    causes = dict.fromkeys(CAUSES, 0.0)
    left_s = ttft_s
    for name, micros, *_ in record["path"]:
        seconds = min(left_s, micros / 1e6)
        causes[_CAUSE_OF.get(name, "rest")] += seconds
        left_s -= seconds
    causes["rest"] += left_s
    return TracedRequest(
        begun_wall_s=float(record["time"]),
        prompt_tokens=int(record["prompt_tokens"]),
        output_tokens=tokens,
        cached_tokens=int(record["cached_tokens"]),
        ttft_s=ttft_s,
        mean_gap_s=max(0.0, record["total_s"] - ttft_s) / (tokens - 1) if tokens > 1 else 0.0,
        causes=causes,
        migrated=bool(record["migrations"]),
        read_bytes=int(record["read_bytes"]),
        read_blocks=sum(blocks for *_, blocks in record["offers"]),
        transfers=tuple(_transfers(record)),
        named_tokens=int(record.get("prompt_blocks", [0])[0]),
        block_names=bytes.fromhex(record.get("prompt_blocks", [0, ""])[1]),
    )


def _transfers(record: Mapping[str, Any]) -> Iterable[tuple[float, float]]:
    blocks = sum(count for *_, count in record["offers"])
    for begin, landed, _, count in record["offers"]:
        seconds = (landed - begin) / 1e6
        if count and seconds > MIN_TRANSFER_S:
            yield record["read_bytes"] * count / blocks, seconds
