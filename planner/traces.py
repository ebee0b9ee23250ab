"""Traffic to simulate: requests with arrival times, lengths and block hashes, and never text.

    mooncake      JSON lines {"timestamp": ms, "input_length", "output_length", "hash_ids"}
                  (kvcache-ai/Mooncake); a hash id names a 512-token block and its whole prefix
    azure         CSV TIMESTAMP,ContextTokens,GeneratedTokens (Azure/AzurePublicDataset)
    recorded      JSON lines {"arrived_s", "prompt_tokens", "output_tokens", "blocks",
                  "block_tokens"}: what a router records; the fields are checked as strictly as the
                  others

Without hashes no two prompts share a block. Reading is bounded, and every error names the file, the
line and the field. Pure but for the file that it reads. Distributions: trace_distributions.py.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from baton.runtime.errors import ConfigError

BLOCK_TOKENS = 512
MAX_REQUESTS = 2_000_000
MAX_LINE_CHARACTERS = 1 << 20
MAX_TOKENS = 1 << 24  # of a prompt or an output
MAX_SECONDS = 366 * 86_400.0
MAX_HASH = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `blocks` names the prompt's blocks of `block_tokens` (a power of two), and its
    partial last one or not; empty: no other prompt has the same prefix."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS


def read_trace(path: Path, limit: int = MAX_REQUESTS) -> list[TraceRequest]:
    """Return the first `limit` requests in order of arrival; the first arrives at 0. The format is
    recognised by the first line. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = _lines(file, path)
            first = next(lines, None)
            if first is None:
                raise ConfigError(f"{path} is empty: give a trace with at least one request")
            parse = _parser(first[1], path)
            requests: list[TraceRequest] = []
            for source, line in [] if parse is _azure else [first]:
                requests.append(parse(line, source))
            for source, line in lines:
                if len(requests) >= limit:
                    break
                requests.append(parse(line, source))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    if not requests:
        raise ConfigError(f"{path} has no request after its header")
    return in_order(requests)


def in_order(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Return the requests by arrival, moved so that the first arrives at 0."""
    ordered = sorted(requests, key=lambda each: each.arrived_s)
    start_s = ordered[0].arrived_s
    return [replace(each, arrived_s=each.arrived_s - start_s) for each in ordered]


def write_traffic(requests: Iterable[TraceRequest], path: Path) -> None:
    """Write requests as recorded JSON lines. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        for each in requests:
            fields: dict[str, Any] = {
                "arrived_s": round(each.arrived_s, 6),
                "prompt_tokens": each.prompt_tokens,
                "output_tokens": each.output_tokens,
            }
            if each.blocks:
                fields["blocks"] = each.blocks
                fields["block_tokens"] = each.block_tokens
            file.write(json.dumps(fields) + "\n")


def at_rate(requests: list[TraceRequest], factor: float) -> list[TraceRequest]:
    """Return the trace played `factor` times as fast."""
    return [replace(each, arrived_s=each.arrived_s / factor) for each in requests]


def _lines(file: TextIO, path: Path) -> Iterator[tuple[str, str]]:
    """Yield (file:line, text) of the lines that are not blank. Reads no more of a line than it may
    have."""
    read = partial(file.readline, MAX_LINE_CHARACTERS + 1)
    for number, line in enumerate(iter(read, ""), 1):
        if len(line) > MAX_LINE_CHARACTERS:
            raise ConfigError(
                f"{path}:{number} has more than {MAX_LINE_CHARACTERS} characters: divide it"
            )
        if number > MAX_REQUESTS + 1:
            raise ConfigError(f"{path} has more than {MAX_REQUESTS} lines: divide it")
        if line.strip():
            yield f"{path}:{number}", line


def _parser(first: str, path: Path) -> Callable[[str, str], TraceRequest]:
    if first.replace(" ", "").strip().lower() == "timestamp,contexttokens,generatedtokens":
        return _azure
    if not first.lstrip().startswith("{"):
        raise ConfigError(
            f"{path}:1 is neither a JSON object (Mooncake, recorded traffic) nor the header "
            "TIMESTAMP,ContextTokens,GeneratedTokens (Azure)"
        )
    return _mooncake if '"input_length"' in first else _recorded


def _mooncake(line: str, source: str) -> TraceRequest:
    values = _fields(line, source, ("timestamp", "input_length", "output_length"), ("hash_ids",))
    return TraceRequest(
        _seconds(values["timestamp"], source, "timestamp", 1000.0),
        _tokens(values["input_length"], source, "input_length"),
        _tokens(values["output_length"], source, "output_length"),
        _blocks(values, "hash_ids", "input_length", source),
    )


def _recorded(line: str, source: str) -> TraceRequest:
    wanted, optional = ("arrived_s", "prompt_tokens", "output_tokens"), ("blocks", "block_tokens")
    values = _fields(line, source, wanted, optional)
    size = _tokens(values.get("block_tokens", BLOCK_TOKENS), source, "block_tokens")
    if size > BLOCK_TOKENS or size & (size - 1):
        raise ConfigError(
            f"{source}: block_tokens is {size}, not a power of two up to {BLOCK_TOKENS}"
        )
    return TraceRequest(
        _seconds(values["arrived_s"], source, "arrived_s", 1.0),
        _tokens(values["prompt_tokens"], source, "prompt_tokens"),
        _tokens(values["output_tokens"], source, "output_tokens"),
        _blocks(values, "blocks", "prompt_tokens", source, size),
        size,
    )


def _azure(line: str, source: str) -> TraceRequest:
    cells = next(csv.reader([line]))
    if len(cells) != 3:
        raise ConfigError(f"{source} has {len(cells)} columns, not 3")
    try:
        arrived = datetime.fromisoformat(cells[0].strip()[:26])
    except ValueError:
        raise ConfigError(
            f"{source}: TIMESTAMP is {cells[0][:40]!r}, not a time like 2023-11-16 18:17:03.979960"
        ) from None
    since_s = (arrived.replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()
    prompt, output = (
        _tokens(_whole(cell, source, name), source, name)
        for cell, name in zip(cells[1:], ("ContextTokens", "GeneratedTokens"), strict=True)
    )
    return TraceRequest(since_s, prompt, output)


def _fields(
    line: str, source: str, wanted: tuple[str, ...], optional: tuple[str, ...]
) -> Mapping[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source} is not a JSON object")
    for name in wanted:
        if name not in values:
            raise ConfigError(f"{source}: the field {name} is missing")
    for name in sorted(values.keys() - {*wanted, *optional}):
        raise ConfigError(
            f"{source}: unknown field {name[:40]!r}; known are {', '.join([*wanted, *optional])}"
        )
    return values


def _seconds(found: object, source: str, name: str, per_second: float) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or found != found:
        raise ConfigError(f"{source}: {name} is {found!r:.40}, not a number")
    if not 0 <= found <= MAX_SECONDS * per_second:
        raise ConfigError(f"{source}: {name} is {str(found)[:40]}, below 0 or more than a year")
    return found / per_second


def _tokens(found: object, source: str, name: str) -> int:
    if isinstance(found, bool) or not isinstance(found, int):
        raise ConfigError(f"{source}: {name} is {found!r}, not a whole number")
    if not 1 <= found <= MAX_TOKENS:
        raise ConfigError(f"{source}: {name} is {found}, not from 1 to {MAX_TOKENS}")
    return found


def _whole(cell: str, source: str, name: str) -> int:
    text = cell.strip()
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise ConfigError(f"{source}: {name} is {cell[:40]!r}, not a whole number")
    return int(text)


def _blocks(
    values: Mapping[str, Any], name: str, length: str, source: str, size: int = BLOCK_TOKENS
) -> tuple[int, ...]:
    found = values.get(name, [])
    if not isinstance(found, list):
        raise ConfigError(f"{source}: {name} is not a list")
    if not found:
        return ()
    full = values[length] // size
    if not full <= len(found) <= full + 1:
        raise ConfigError(
            f"{source}: {name} has {len(found)} entries, and {values[length]} tokens have {full} "
            f"full blocks of {size}"
        )
    for index, each in enumerate(found):
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each <= MAX_HASH:
            raise ConfigError(f"{source}: {name}[{index}] is {each!r}, not from 0 to {MAX_HASH}")
    return tuple(found)
