"""The deterministic mode on a GPU: whether it holds there, and what it costs.

Small random models go through `tests/engine/deterministic_story.py`, each in a process of its
own. Then the same steps of a known shape run with and without the mode, in turns. Holds no state.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.figures.report import Figure
from benchmarks.gpu_parts.models import decode_seconds, prompt_step, sized_runner
from benchmarks.gpu_parts.small_model import write_small_model

ROOT = Path(__file__).resolve().parents[2]
STORY = ROOT / "tests" / "engine" / "deterministic_story.py"
# With query and key norms and without; as `deterministic_story.py` takes them.
STORIES: tuple[tuple[bool, tuple[str, ...]], ...] = (
    (True, ()),
    (False, ("--kv-dtype=fp8_e4m3", "--quantization=int8")),
)


def deterministic(given: Any) -> Iterator[Figure]:
    """Figures of `benchmarks.gpu`; raises RuntimeError where a bit differs."""
    held: list[bool] = []
    with TemporaryDirectory() as folder:
        for qk_norm, more in STORIES[:1] if given.dry else STORIES:
            model = Path(folder) / f"model{qk_norm:d}"
            write_small_model(model, qk_norm)
            line = [sys.executable, "-P", str(STORY), str(model), f"--device={given.device.type}"]
            done = subprocess.run([*line, *more], stdout=subprocess.PIPE, text=True, timeout=300)
            if done.returncode not in (0, 1) or not done.stdout:
                raise RuntimeError(f"{line} ended with {done.returncode}")
            found = {
                name: good for name, good in json.loads(done.stdout).items() if name != "apart"
            }
            if not all(found.values()):
                raise RuntimeError(f"{line}: {found}")
            held += found.values()
    yield Figure("deterministic_checks_held", float(sum(held)))
    yield from _costs(given)


def _costs(given: Any) -> list[Figure]:
    """`deterministic_cost_*`: step time with over without."""
    shape = given.shape("qwen3-0.6b")
    tokens, rows, steps = (24, 2, 2) if given.dry else (1024, 8, 24)
    wide = tokens + 16 * steps + 16
    prefill: dict[bool, list[float]] = {False: [], True: []}
    decode: dict[bool, list[float]] = {False: [], True: []}
    runners = {
        mode: sized_runner(
            shape, given.device, rows=rows, context=wide, buckets=(rows,), deterministic=mode
        )
        for mode in prefill
    }
    batch = prompt_step(shape, tokens, wide)
    for turn in range(2 if given.dry else 6):
        for mode, runner in runners.items():
            begun = time.perf_counter()
            runner.run(batch)  # returns when the drawn token is on the host
            prefill[mode].append(time.perf_counter() - begun)
            decode[mode].append(decode_seconds(runner, rows, tokens // 2, wide, steps))
            if not turn:  # kernels are compiled
                prefill[mode].clear()
                decode[mode].clear()
    return [
        Figure(f"deterministic_cost_{name}", median(times[True]) / median(times[False]))
        for name, times in ((f"prefill_{tokens}", prefill), (f"decode_bs{rows}", decode))
    ]
