"""Measure the console under load: frames a second of its page, and what it costs the router.

    python -m benchmarks.console [--rate 166.7] [--workers 64] [--rounds 5] --json FILE

A real router process before hash workers, which get `--rate` requests a second; 166.7 are 10,000 a
minute. Each round measures a page in headless Chromium, a reader of the page's stream that draws
nothing, and neither, in turns of another order. The page shows all workers and the requests as
they end. Needs build/clients/browser (`make clients`) and Chromium.

    router_cpu_ratio     router CPU for a request, with a reader over without: all that a page costs
                         the router, sending included; median of the rounds' own ratios
    browser_cpu_ratio    the same with Chromium, which takes caches and time from the same cores:
                         an operator's browser runs elsewhere
    idle_cpu_ratio       largest over least of the rounds without: what the machine itself varies
    state_share          CPU of the console's state over that of the router, with a page open
    frames_per_s         of the page, and the longest time between two frames; least and longest
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import secrets
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from benchmarks.figures.report import Figure, at_least, at_most, parser, report
from benchmarks.fleets.routed_workers import RoutedWorkers
from benchmarks.overload import Client, LoadResults

ROOT = Path(__file__).parents[2]
BROWSER = ROOT / "build" / "clients" / "browser" / "bin" / "python"
COUNTED = re.compile(r"^baton_console_seconds_total (\S+)$", re.MULTILINE)
DEADLINE_S = 30.0
STEP_MS = 100  # a request of 16 tokens takes 1.6 s
PAGE_S = 90.0  # to open and to count
MAX_CPU_RATIO = 1.01
Kind = Literal["page", "reader", "none"]
TURNS: tuple[tuple[Kind, ...], ...] = (
    ("page", "reader", "none"),
    ("reader", "none", "page"),
    ("none", "page", "reader"),
)  # of the rounds one after another, so that no kind always comes first


@dataclass(frozen=True, slots=True)
class ConsoleRound:
    """`requests` were answered with 200; `page` is what the page counted, empty without one."""

    kind: Kind
    requests: int
    seconds: float
    router_cpu_s: float
    state_cpu_s: float
    page: dict[str, float]

    @property
    def request_ms(self) -> float:
        """CPU of the router for a request."""
        return 1e3 * self.router_cpu_s / self.requests


async def read_stream(url: str, key: str) -> None:
    """Read the stream of a page until cancelled, and draw nothing."""
    headers = {"authorization": f"Bearer {key}"}
    async with (
        httpx.AsyncClient(timeout=30) as http,
        http.stream("GET", f"{url}/console/stream", headers=headers) as reply,
    ):
        reply.raise_for_status()
        async for _ in reply.aiter_raw():
            pass


async def offer(client: Client, rate: float, until: asyncio.Event, seen: LoadResults) -> None:
    """Ask at random moments, `rate` a second, until the event is set."""
    draws, at_s = random.Random(1), time.perf_counter()
    async with asyncio.TaskGroup() as asking:
        while not until.is_set():
            at_s += draws.expovariate(rate)
            # Requests come at random moments.
            await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
            asking.create_task(client.complete(seen))


async def one_round(
    routed: RoutedWorkers,
    seen: LoadResults,
    browser: asyncio.subprocess.Process,
    kind: Kind,
    options: argparse.Namespace,
) -> ConsoleRound:
    """Measure for so long, under the load that runs beside it."""
    before = seen.statuses[200], routed.router_cpu_s(), await _state_s(routed)
    begun_s = time.perf_counter()
    seconds: float = options.seconds
    page: dict[str, float] = {}
    if kind == "none":
        # The load is measured over this time.
        await asyncio.sleep(seconds)
    elif kind == "reader":
        url = f"http://{routed.admin_address}"
        reader = asyncio.create_task(read_stream(url, options.key))
        done, _ = await asyncio.wait([reader], timeout=seconds)
        if done:  # a reader ends only when it is cancelled
            reader.result()
            raise RuntimeError("the console's stream ended: this round had no reader")
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    else:
        assert browser.stdin is not None and browser.stdout is not None
        browser.stdin.write(b"%g\n" % seconds)
        async with asyncio.timeout(seconds + PAGE_S):
            page = json.loads(await browser.stdout.readline())
    return ConsoleRound(
        kind,
        seen.statuses[200] - before[0],
        time.perf_counter() - begun_s,
        routed.router_cpu_s() - before[1],
        await _state_s(routed) - before[2],
        page,
    )


async def _state_s(routed: RoutedWorkers) -> float:
    async with httpx.AsyncClient(timeout=30) as http:
        text = (await http.get(f"http://{routed.admin_address}/metrics")).text
    (found,) = COUNTED.findall(text)
    return float(found)


async def measure(
    routed: RoutedWorkers, address: str, options: argparse.Namespace
) -> list[ConsoleRound]:
    client, seen, stop = Client(address, DEADLINE_S), LoadResults(), asyncio.Event()
    await client.ready()
    browser = await asyncio.create_subprocess_exec(
        *(str(BROWSER), "-m", "benchmarks.console.frames"),
        *(f"http://{routed.admin_address}", options.key, str(options.chromium)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    load = asyncio.create_task(offer(client, options.rate, stop, seen))
    try:
        await one_round(routed, seen, browser, "page", options)  # browser and router warm up
        rounds = []
        for number in range(options.rounds):
            for kind in TURNS[number % len(TURNS)]:
                rounds.append(await one_round(routed, seen, browser, kind, options))
    finally:
        stop.set()
        await load
        assert browser.stdin is not None
        browser.stdin.close()
        await browser.wait()
        client.close()
    return rounds


def figures(rounds: list[ConsoleRound], options: argparse.Namespace) -> list[Figure]:
    by_kind = {kind: [each for each in rounds if each.kind == kind] for kind in TURNS[0]}
    watched, alone = by_kind["page"], [each.request_ms for each in by_kind["none"]]
    per_minute = 60 * sum(each.requests for each in rounds) / sum(each.seconds for each in rounds)
    share = sum(each.state_cpu_s for each in watched) / sum(each.router_cpu_s for each in watched)
    core = sum(each.state_cpu_s for each in watched) / sum(each.seconds for each in watched)
    return [
        Figure("requests_per_min", per_minute, "", f"offered: {60 * options.rate:.0f}"),
        Figure("workers_shown", min(each.page["workers"] for each in watched)),
        at_least("frames_per_s", min(each.page["frames_per_s"] for each in watched), 30.0),
        Figure("longest_frame_ms", max(each.page["longest_ms"] for each in watched), "ms"),
        at_most("state_share", share, 0.01),
        Figure("state_core_share", core, "", "of one core"),
        Figure("router_cpu_ms", statistics.median(alone), "ms", "for a request, without a page"),
        _ratio("router_cpu_ratio", by_kind["reader"], by_kind["none"], limit=MAX_CPU_RATIO),
        _ratio("browser_cpu_ratio", watched, by_kind["none"]),
        Figure("idle_cpu_ratio", max(alone) / min(alone), "", "of the rounds without"),
    ]


def _ratio(
    name: str, those: list[ConsoleRound], others: list[ConsoleRound], limit: float | None = None
) -> Figure:
    """Return the median of the rounds' ratios with their spread; without a limit it is reported
    alone."""
    ratios = [a.request_ms / b.request_ms for a, b in zip(those, others, strict=True)]
    found, spread = statistics.median(ratios), f"rounds: {min(ratios):.3f} to {max(ratios):.3f}"
    if limit is None:
        return Figure(name, found, "", spread)
    return Figure(name, found, "", f"limit: at most {limit:g}; {spread}", found <= limit)


def main() -> None:
    options_parser = parser(__doc__ or "")
    options_parser.add_argument("--rate", type=float, default=10_000 / 60, help="requests a second")
    options_parser.add_argument("--workers", type=int, default=64)
    options_parser.add_argument("--seconds", type=float, default=10.0, help="of a round")
    options_parser.add_argument("--rounds", type=int, default=5)
    options = options_parser.parse_args()
    options.chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    options.key = secrets.token_urlsafe(24)
    if options.chromium is None or not BROWSER.exists():
        raise SystemExit("Chromium or build/clients/browser is absent: install it, `make clients`")
    workers = [f"--workers={options.workers}", f"--step-ms={STEP_MS}", "--sequences=64"]
    routed = RoutedWorkers(workers, admin_key=options.key)
    try:
        routed.wait_workers(options.workers)
        rounds = asyncio.run(measure(routed, routed.start_router(), options))
    finally:
        routed.close()
    report(figures(rounds, options), options.json)


if __name__ == "__main__":
    main()
