"""Measure the console under load: frames a second of its page, and what it costs the router.

    python -m benchmarks.console [--rate 166.7] [--workers 64] [--rounds 3] --json FILE

A real router process before hash workers, which get `--rate` requests a second; 166.7 are 10,000 a
minute. Rounds alternate between a page in headless Chromium and none. The page shows all workers
and the requests as they end. Needs build/clients/browser (`make clients`) and Chromium.

    state_share        CPU of the console's state over that of the router, with a page open
    router_cpu_ratio   router CPU for a request, with a page over without: medians of the rounds
    frames_per_s       of the page, and the longest time between two frames; least and longest
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


@dataclass(frozen=True, slots=True)
class ConsoleRound:
    """`requests` were answered with 200; `page` is what the page counted, empty without one."""

    requests: int
    seconds: float
    router_cpu_s: float
    state_cpu_s: float
    page: dict[str, float]


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
    browser: asyncio.subprocess.Process | None,
    seconds: float,
) -> ConsoleRound:
    """Measure for so long, under the load that runs beside it."""
    before = seen.statuses[200], routed.router_cpu_s(), await _state_s(routed)
    begun_s = time.perf_counter()
    page: dict[str, float] = {}
    if browser is None:
        # The load is measured over this time.
        await asyncio.sleep(seconds)
    else:
        assert browser.stdin is not None and browser.stdout is not None
        browser.stdin.write(b"%g\n" % seconds)
        async with asyncio.timeout(seconds + PAGE_S):
            page = json.loads(await browser.stdout.readline())
    return ConsoleRound(
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
        await one_round(routed, seen, browser, 2.0)  # the browser and the router warm up
        rounds = []
        for _ in range(options.rounds):
            for page in (browser, None):
                rounds.append(await one_round(routed, seen, page, options.seconds))
    finally:
        stop.set()
        await load
        assert browser.stdin is not None
        browser.stdin.close()
        await browser.wait()
        client.close()
    return rounds


def figures(rounds: list[ConsoleRound], options: argparse.Namespace) -> list[Figure]:
    watched = [each for each in rounds if each.page]
    alone = [each for each in rounds if not each.page]

    def cpu_ms(those: list[ConsoleRound]) -> float:
        return 1e3 * statistics.median(each.router_cpu_s / each.requests for each in those)

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
        Figure("router_cpu_ms", cpu_ms(watched), "ms", "for a request, with a page"),
        Figure("router_cpu_ratio", cpu_ms(watched) / cpu_ms(alone), "", "with a page over without"),
    ]


def main() -> None:
    options_parser = parser(__doc__ or "")
    options_parser.add_argument("--rate", type=float, default=10_000 / 60, help="requests a second")
    options_parser.add_argument("--workers", type=int, default=64)
    options_parser.add_argument("--seconds", type=float, default=10.0, help="of a round")
    options_parser.add_argument("--rounds", type=int, default=3)
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
