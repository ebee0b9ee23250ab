"""A model over ranks, each on a GPU of its own, against one process: a part of `benchmarks.gpu`.

What is compared is in tests/engine/device_ranks_story.py: sequences, a copied block, handoffs
between ranks and one process, and whether the end of a rank is noticed. In a dry run the ranks are
processes of the CPU, with Triton's interpreter and gloo.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.figures.report import Figure
from benchmarks.gpu_parts.small_model import write_small_model
from benchmarks.gpu_parts.speed import Given, Skipped

STORY = Path(__file__).resolve().parents[2] / "tests" / "engine" / "device_ranks_story.py"
STORY_S = 300.0
RANKS = 2


def ranks(given: Given) -> Iterator[Figure]:
    """Yield how many comparisons held, with NCCL's sums and then with deterministic ones. Raises
    RuntimeError where one did not."""
    if given.device.type == "cuda" and (found := torch.cuda.device_count()) < RANKS:
        raise Skipped(f"{RANKS} ranks need {RANKS} GPUs, and torch sees {found}")
    with TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_small_model(model, qk_norm=True)
        for name, more in (("ranks", []), ("deterministic_ranks", ["--deterministic"])):
            held = _held(given, model, more)
            if not all(held):
                raise RuntimeError(f"comparisons with one process that held: {held}")
            yield Figure(f"{name}_held", float(sum(held)), "", f"of {len(held)}")


def _held(given: Given, model: Path, more: list[str]) -> list[bool]:
    line = [sys.executable, "-P", str(STORY), str(model), f"--device={given.device.type}"]
    line += [f"--ranks={RANKS}", f"--steps={2 if given.dry else 12}", *more]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, timeout=STORY_S)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{line} ended with {done.returncode}")
    return [bool(each) for each in json.loads(done.stdout)]
