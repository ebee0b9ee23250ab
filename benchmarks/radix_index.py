"""How fast the router's radix index answers, takes events and forgets, and what it weighs.

    python -m benchmarks.radix_index [--blocks 1000000] [--workers 16] [--json FILE]

A lookup is one `match` of a whole prompt against all workers at once. The hashing of the prompt
into identities is timed apart. Knows no network: the events are made here.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time
from pathlib import Path

import orjson

from baton.proto import worker_pb2
from baton.router.fleet.radix_index import RadixIndex
from baton.runtime.identity import chain, cluster_key, root

PROMPT_BLOCKS = 64  # 1,024 tokens in blocks of 16
PART = 65_536


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fill(index: RadixIndex, prompts: list[list[bytes]], workers: int) -> int:
    """Give each prompt's blocks to one to four workers; returns the events' block count."""
    draws = random.Random(1)
    held: dict[int, list[bytes]] = {worker: [] for worker in range(workers)}
    for blocks in prompts:
        for worker in draws.sample(range(workers), min(workers, draws.randint(1, 4))):
            held[worker] += blocks
    for worker, blocks in held.items():
        for start in range(0, max(1, len(blocks)), PART):
            index.apply(
                str(worker),
                worker_pb2.BlockEvents(
                    boot_id=b"b" * 16,
                    snapshot=True,
                    snapshot_end=start + PART >= len(blocks),
                    stored=b"".join(blocks[start : start + PART]),
                ),
            )
    return sum(map(len, held.values()))


def time_lookups(index: RadixIndex, prompts: list[list[bytes]], count: int) -> list[float]:
    draws = random.Random(2)
    seconds = []
    for _ in range(count):
        prompt = draws.choice(prompts)
        started = time.perf_counter()
        index.match(prompt)
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(blocks: int, workers: int) -> dict[str, float]:
    """All figures; times in seconds unless named otherwise."""
    key = cluster_key("benchmark")
    parent = root(key, "model", "bfloat16")
    draws = random.Random(0)
    tokens = [draws.randrange(1 << 17) for _ in range(PROMPT_BLOCKS * 16)]
    started = time.perf_counter()
    for _ in range(100):
        chain(key, parent, tokens, 16)
    hash_s = (time.perf_counter() - started) / 100
    prompts = [
        [draws.randbytes(16) for _ in range(PROMPT_BLOCKS)] for _ in range(blocks // PROMPT_BLOCKS)
    ]
    index = RadixIndex(capacity_blocks=2 * blocks)
    before = resident_bytes()
    started = time.perf_counter()
    stored = fill(index, prompts, workers)
    fill_s = time.perf_counter() - started
    weight = resident_bytes() - before
    lookups = time_lookups(index, prompts, 20_000)
    started = time.perf_counter()
    index.remove("0")
    remove_s = time.perf_counter() - started
    sweeps = []
    for _ in range(blocks // 20_000 + 2):
        started = time.perf_counter()
        index.sweep()
        sweeps.append(time.perf_counter() - started)
    return {
        "blocks": len(index),
        "workers": workers,
        "lookups_per_s": len(lookups) / sum(lookups),
        "lookup_us_p50": statistics.median(lookups) * 1e6,
        "lookup_us_p99": sorted(lookups)[len(lookups) * 99 // 100] * 1e6,
        "hash_prompt_us": hash_s * 1e6,
        "stored_events_per_s": stored / fill_s,
        "bytes_per_block": weight / max(1, len(index)),
        "remove_worker_us": remove_s * 1e6,
        "sweep_ms_max": max(sweeps) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure(options.blocks, options.workers)
    for name, value in figures.items():
        print(f"{name:22s} {value:14,.1f}")
    if options.json is not None:
        options.json.write_bytes(orjson.dumps(figures))


if __name__ == "__main__":
    main()
