"""`baton trace`: where the time of a request went, as a waterfall in plain text.

    ID                 each phase of the critical path with its bar; what of the fetch was hidden
                       behind it; what followed
    --slow, --latest   the slowest or the last ones, and what took most of their time

Reads the router's routes for traces; changes nothing.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from typing import Any, Literal
from urllib.parse import quote

from baton.deploy.cli.chat import ChatClient, printable
from baton.deploy.cli.chat_session import running_url
from baton.runtime.telemetry.timeline import covered

NARROWEST, WIDEST = 60, 200  # characters of a line
NAME_WIDTH = 34
LARGEST = 3  # phases named of each slow request
ON_PATH, HIDDEN = "#", "."

Row = tuple[str, int, int, str]  # name, begin and duration in microseconds, mark


def show_trace(request_id: str, url: str | None, api_key: str | None, *, as_json: bool) -> None:
    """Print one request's trace. Raises ConfigError without a server, ServerRefusal where it has no
    such trace, Unavailable if nothing answers."""
    found = _client(url, api_key).trace(f"/trace/{quote(request_id, safe='')}", "path")
    width = min(WIDEST, max(NARROWEST, shutil.get_terminal_size((100, 40)).columns))
    text = json.dumps(found, indent=2) if as_json else "\n".join(waterfall(found, width))
    print(printable(text))


def show_traces(
    which: Literal["slow", "latest"],
    count: int,
    url: str | None,
    api_key: str | None,
    *,
    as_json: bool,
) -> None:
    """Print the slowest or the latest of the requests that the router has in memory. Raises as
    `show_trace`."""
    found = _client(url, api_key).trace(f"/traces?{which}={count}", "traces")
    text = json.dumps(found, indent=2) if as_json else "\n".join(listing(found["traces"]))
    print(printable(text))


def waterfall(found: dict[str, Any], width: int) -> list[str]:
    """Return the lines of one request's drawing, of at most `width` characters."""
    path = list(_rows(found["path"], 0))
    begun, after = found["after_us"], list(_rows(found["after"], found["after_us"]))
    hidden = list(_hidden_rows(found))
    end = max([1, *(begin + took for _, begin, took, _ in (*path, *after, *hidden))])
    room = width - NAME_WIDTH - 14
    lines = [
        *_head(found),
        f"{'critical path':<{NAME_WIDTH}} {_path_us(found) / 1e3:>9.1f} ms",
        *(_line(row, end, room) for row in path),
    ]
    if found["offers"]:
        lines += [_hidden_title(found), *(_line(row, end, room) for row in hidden)]
    if after:
        took = sum(row[2] for row in after) / 1e3
        title = "after the first token reached the router"
        lines += [f"{title}, at {begun / 1e3:.1f} ms: {took:.1f} ms"]
        lines += [_line(row, end, room) for row in after]
    return [line[:width].rstrip() for line in lines]


def listing(traces: list[dict[str, Any]]) -> list[str]:
    """Return a line for each trace: its id, when it began, the time to its first byte, and the
    largest phases with their shares."""
    if not traces:
        return ["this router has answered no request of this key"]
    lines = [f"{'request':<36} {'began':<14} {'first byte':>12}  where its time went"]
    for found in traces:
        whole = max(1, _path_us(found))
        sums: dict[str, int] = {}
        for name, took, _, where in found["path"]:
            label = f"{name} ({where})" if where else name
            sums[label] = sums.get(label, 0) + took
        largest = sorted(sums.items(), key=lambda item: -item[1])[:LARGEST]
        shares = ", ".join(f"{name} {took / whole:.0%}" for name, took in largest)
        kept = f"  [{', '.join(found['kept'])}]" if found["kept"] else ""
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(found["time"]))
        answered = found["ttft_s"] is not None
        first = f"{1e3 * found['ttft_s']:>9.1f} ms" if answered else f"{'none':>12}"
        lines.append(f"{found['id']:<36} {at} {first}  {shares}{kept}")
    return lines


def _path_us(found: dict[str, Any]) -> int:
    """Return the time to the answer's first byte, or to the end of a request without an answer."""
    return sum(took for _, took, *_ in found["path"])


def _head(found: dict[str, Any]) -> list[str]:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["time"]))
    facts = [found["outcome"], *found["kept"]]
    if found["trace_id"]:
        facts.append(f"trace {found['trace_id']}")
    return [
        f"{found['id']}  {at}  {', '.join(facts)}",
        f"{found['prompt_tokens']} prompt tokens ({found['cached_tokens']} cached), "
        f"{found['output_tokens']} output tokens, {1e3 * found['total_s']:.1f} ms in all, "
        f"decoded on {found['decode_worker'] or 'no worker'}",
    ]


def _hidden_title(found: dict[str, Any]) -> str:
    reading_us = covered((begin, landed) for begin, landed, *_ in found["offers"])
    speed = found["read_bytes"] / 1e3 / max(1, reading_us)
    title = f"handoff: {found['read_bytes'] / 1e6:.1f} MB, {found['reads']} READs, {speed:.2f} GB/s"
    if transport := found.get("transport"):  # routers of an older version name none
        title += f" over {transport}"
    return f"{title} (`{HIDDEN}`: hidden behind the prefill, not in the sum)"


def _hidden_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Yield the part of each fetched offer that was over when the first token came. The rest is
    `fetch` and `verify` of what followed."""
    hidden_us = found.get("hidden_us")
    if hidden_us is None:  # a router of an older version
        hidden_us = [min(end, found["after_us"]) - begin for begin, _, end, _ in found["offers"]]
    for (begin, _, verified, blocks), took in zip(found["offers"], hidden_us, strict=True):
        if took > 0:
            partly = " in part" if took < verified - begin else ""
            yield f"{blocks} blocks fetched{partly}", begin, took, HIDDEN


def _rows(phases: list[list[Any]], at_us: int) -> Iterator[Row]:
    for name, took, count, where in phases:
        label = f"{where} {name}" if where else name
        if count:
            label += f" ({count} {'blocks' if name == 'fetch' else 'tokens'})"
        if took:
            yield label, at_us, took, ON_PATH
        at_us += took


def _line(row: Row, end_us: int, room: int) -> str:
    name, begin, took, mark = row
    first = min(room - 1, begin * room // end_us)
    length = max(1, min(room - first, (begin + took) * room // end_us - first))
    bar = " " * first + mark * length
    return f"  {name[: NAME_WIDTH - 2]:<{NAME_WIDTH - 2}} {took / 1e3:>9.1f}  {bar}"


def _client(url: str | None, api_key: str | None) -> ChatClient:
    return ChatClient(url or running_url(api_key), api_key)
