"""Flags and readers of the commands that replay traffic: `bench`, `simulate` and `tune`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.deploy.serve.flag_values import new_file, whole
from baton.runtime.errors import ConfigError

if TYPE_CHECKING:
    from baton.planner.traces import TraceRequest
    from baton.simulation.capacity.layout import Objectives

UNITS = {"ms": 0.001, "s": 1.0}
BAR_CHARACTERS = 40
UNMET_EXIT = 3  # `tune`, `size`: no layout meets the objectives; `bench`: too few requests
MAX_REQUESTS = 2_000_000


def add_source(command: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the flags of a trace or of distributions."""
    source = command.add_mutually_exclusive_group(required=required)
    source.add_argument(
        "--trace", type=Path, metavar="FILE", help="Mooncake or recorded JSON lines, or Azure's CSV"
    )
    source.add_argument(
        "--traffic", metavar="TEXT",
        help="distributions: requests=1000,rate=4,prompt=lognormal:2000:0.8,output=exponential:300",
    )  # fmt: skip
    command.add_argument(
        "--limit", type=whole(1, MAX_REQUESTS), metavar="N",
        help="only the first N requests (default: all)",
    )  # fmt: skip
    command.add_argument(
        "--speed", type=positive, default=1.0, metavar="X",
        help="play the traffic X times as fast (default: 1)",
    )  # fmt: skip


def add_reporting(command: argparse.ArgumentParser) -> None:
    """Add the flags of the objectives and of the report."""
    command.add_argument(
        "--slo", metavar="ttft=500ms,itl=40ms", default="",
        help="objectives of a request: time to its first token, mean time between its tokens",
    )  # fmt: skip
    command.add_argument("--json", type=new_file, metavar="FILE", help="write the report here too")
    command.add_argument(
        "--plot", type=_png, metavar="FILE.png", help="draw the report; needs matplotlib"
    )


def read_source(options: argparse.Namespace) -> list[TraceRequest]:
    """Return the requests that the flags name. Raises ConfigError."""
    from baton.planner.trace_distributions import draw_trace
    from baton.planner.traces import at_rate, read_trace

    limit = options.limit or MAX_REQUESTS
    if options.trace is not None:
        requests = read_trace(options.trace, limit)
    else:
        requests = draw_trace(options.traffic)[:limit]
    return at_rate(requests, options.speed)


def read_objectives(text: str) -> Objectives:
    """Parse `ttft=500ms,itl=40ms`. Raises ConfigError, which names the part."""
    from baton.simulation.capacity.layout import Objectives

    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        unit = "ms" if value.endswith("ms") else "s"
        number = value.removesuffix(unit)
        if name not in ("ttft", "itl") or name in found or not value.endswith(unit):
            raise ConfigError(f"--slo {part.strip()!r}: give ttft and itl once, as ttft=500ms")
        try:
            found[name] = positive(number) * UNITS[unit]
        except argparse.ArgumentTypeError as wrong:
            raise ConfigError(f"--slo {part.strip()!r}: {wrong}") from None
    return Objectives(found.get("ttft", math.inf), found.get("itl", math.inf))


def progress_bar(name: str) -> Callable[[int, int], None]:
    """Return a function that draws how many requests have ended, on stderr if it is a terminal."""
    if not sys.stderr.isatty():
        return lambda finished, total: None

    def draw(finished: int, total: int) -> None:
        filled = BAR_CHARACTERS * finished // max(1, total)
        bar = "#" * filled + "." * (BAR_CHARACTERS - filled)
        end = "\n" if finished == total else ""
        print(f"\r{name} [{bar}] {finished}/{total}", end=end, file=sys.stderr, flush=True)

    return draw


def write_json(path: Path, content: Any) -> None:
    """Write a report. Raises ConfigError."""
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _png(text: str) -> Path:
    path = new_file(text)
    if path.suffix != ".png":
        raise argparse.ArgumentTypeError(f"{text!r}: give a file whose name ends with .png")
    return path


def positive(text: str) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return value


def share(text: str) -> float:
    """Parse a share above 0, at most 1."""
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a share above 0, at most 1")
    return value
