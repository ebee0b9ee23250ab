"""How long a router that was killed takes to know again what its workers hold, and be ready.

    python -m benchmarks.router_restart [--blocks 1000000] [--workers 4] [--rounds 5] --json FILE

A router process is killed and restarted, before workers that hold `blocks` blocks together:
real links, and the product's snapshots over gRPC (hash_workers.py, all of them in one process).

    rebuild_s         from the first look at the registry to all blocks in the index (its own log)
    listen_to_ready_s from the open port to the first /readyz that is 200: medians, and the longest
    start_to_ready_s  from the start of the process, its imports and the tokenizer included
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import time

from benchmarks.figures.report import Figure, at_most, parser, report
from benchmarks.fleets.routed_workers import RoutedWorkers
from benchmarks.overload import Client

_REPORTED = re.compile(r'"blocks":(\d+),"seconds":([0-9.]+),.*"event":"index rebuilt"')


def restart(routed: RoutedWorkers, blocks: int) -> tuple[float, float, float]:
    """Seconds: rebuild, listen to ready, start to ready. Raises RuntimeError if blocks are
    missing when the router is ready."""
    started = time.perf_counter()
    address = routed.start_router()
    listens = time.perf_counter()
    asyncio.run(Client(address, 1.0).ready())
    ready = time.perf_counter()
    reported = _REPORTED.findall(routed.log("router"))
    routed.kill_router()
    if not reported or int(reported[-1][0]) != blocks:
        raise RuntimeError(
            f"of {blocks} blocks the router knows {reported}:\n{routed.log('router')}"
        )
    return float(reported[-1][1]), ready - listens, ready - started


def measure(options: argparse.Namespace) -> list[Figure]:
    each = options.blocks // options.workers
    routed = RoutedWorkers(
        [f"--workers={options.workers}", f"--held-blocks={each}"], ["telemetry.log_level=info"]
    )
    try:
        routed.wait_workers(options.workers)
        rounds = [restart(routed, each * options.workers) for _ in range(options.rounds)]
    finally:
        routed.close()
    rebuilds, listens, starts = zip(*rounds, strict=True)
    return [
        Figure("blocks", each * options.workers, "", f"held by {options.workers} workers"),
        at_most("rebuild_s", statistics.median(rebuilds), 2.0, "s"),
        at_most("rebuild_s_most", max(rebuilds), 2.0, "s"),
        at_most("listen_to_ready_s", statistics.median(listens), 2.0, "s"),
        at_most("listen_to_ready_s_most", max(listens), 2.0, "s"),
        Figure("start_to_ready_s", statistics.median(starts), "s", "imports included"),
    ]


def main() -> None:
    options_parser = parser(__doc__ or "")
    options_parser.add_argument("--blocks", type=int, default=1_000_000)
    options_parser.add_argument("--workers", type=int, default=4)
    options_parser.add_argument("--rounds", type=int, default=5)
    options = options_parser.parse_args()
    report(measure(options), options.json)


if __name__ == "__main__":
    main()
