"""How fast weights load, by all threads and by one, and what memory that takes at its peak.

    python -m benchmarks.loading [--rounds N] [--threads N] [--quick] [--json FILE]

The bf16 model of `benchmarks.engine_cpu`, its files in the page cache: dropping that takes rights
that a benchmark should not have, so what a disk adds is not in these figures. Each load runs in a
process of its own, which has loaded a small model before; the two kinds alternate in a round.

load_s             packed and checked, as `baton serve` loads it; median over rounds
load_one_thread_s  the same with one loading thread, and one thread within torch
load_speedup       the second over the first, median of the rounds' ratios
load_gb_per_s      stored bytes over load_s
read_gb_per_s      the same bytes copied out of the page cache by one thread, and nothing else
load_peak_ratio    memory at the highest (mapped files included) over stored bytes
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from baton.engine.checkpoint import weights
from baton.engine.execution.backend_choice import CpuBackend
from baton.engine.spec.model_spec import read_spec
from baton.models.embedded import embedded_model
from benchmarks.figures.report import Figure, at_most, parser, report
from benchmarks.inputs.cached_model import cached_model

ROUNDS = 5
PEAK_LIMIT = 1.1  # of the model's size
_CHILD_LIMIT_S = 120
_READ_BYTES = 8 << 20


def load(folder: Path, threads: int) -> dict[str, float]:
    """Load `folder` in this process, which should be fresh; return seconds and peak bytes."""
    torch.set_num_threads(threads)
    weights._THREADS = min(threads, weights._THREADS)
    kept = weights.load_weights(
        embedded_model(),
        read_spec(embedded_model()),
        torch.bfloat16,
        CpuBackend().matrices(torch.bfloat16),
    )
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts again
    before, start = _highest_bytes(), time.perf_counter()
    kept = weights.load_weights(
        folder, read_spec(folder), torch.bfloat16, CpuBackend().matrices(torch.bfloat16)
    )
    seconds, peak = time.perf_counter() - start, _highest_bytes() - before
    assert len(kept.layers) > 0
    return {"seconds": seconds, "peak_bytes": peak}


def _highest_bytes() -> int:
    """Resident memory at its highest, by the kernel's own count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: this benchmark needs Linux")


def in_a_process_of_its_own(folder: Path, threads: int) -> dict[str, float]:
    """`load` there. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "benchmarks.loading"]
    done = subprocess.run(
        [*command, f"--threads={threads}", f"--folder={folder}"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_CHILD_LIMIT_S,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def read(files: Sequence[Path]) -> tuple[int, float]:
    """Bytes of `files`, and the seconds that copying them into memory took."""
    buffer, total, start = bytearray(_READ_BYTES), 0, time.perf_counter()
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while count := opened.readinto(buffer):
                total += count
    return total, time.perf_counter() - start


def run(folder: Path, threads: int, rounds: int) -> list[Figure]:
    files = sorted(folder.glob("*.safetensors"))
    read(files)  # from here on they are in the page cache
    all_threads: list[dict[str, float]] = []
    one: list[dict[str, float]] = []
    reading: list[float] = []
    for number in range(rounds):
        order = ((threads, all_threads), (1, one))
        for count, found in order if number % 2 else order[::-1]:
            found.append(in_a_process_of_its_own(folder, count))
        stored, seconds = read(files)
        reading.append(stored / seconds / 1e9)
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(all_threads, one, strict=True)]
    seconds, alone = (
        statistics.median(each["seconds"] for each in found) for found in (all_threads, one)
    )
    peak = max(each["peak_bytes"] for each in all_threads)
    return [
        Figure("load_s", seconds, "s", f"{threads} threads; {stored / 1e6:.0f} MB stored"),
        Figure("load_one_thread_s", alone, "s"),
        Figure("load_speedup", statistics.median(ratios), "", f"{min(ratios):.2f} or more"),
        Figure("load_gb_per_s", stored / seconds / 1e9, "GB/s"),
        Figure("read_gb_per_s", statistics.median(reading), "GB/s", "one thread, page cache"),
        at_most("load_peak_ratio", peak / stored, PEAK_LIMIT),
        Figure("rounds", rounds),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if options.folder is not None:
        print(json.dumps(load(options.folder, options.threads)))
        return
    folder = embedded_model() if options.quick else cached_model()
    report(run(folder, options.threads, options.rounds), options.json)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("How fast weights load, by all threads and by one")
    made.add_argument("--rounds", type=int, default=ROUNDS)
    made.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    made.add_argument("--quick", action="store_true", help="the small embedded model instead")
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # load it, in this process
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
