"""Compute prompts without end, in a bare loop: the engine's kernels and nothing of serving.

    python -m benchmarks.fleets.kernel_loop --model FOLDER [--chunk-tokens 256]

Writes one line when the first prompt is computed. It takes from a neighbour what any prefill must
take on the same machine: memory bandwidth, shared caches and the processor's clock.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.deploy.serve.plan import SHORT_SPIN
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.batch import Slice, StepBatch
from benchmarks.fleets.routed_workers import ROOT

PROMPT_TOKENS = 1500
BLOCK_TOKENS = 16
STARTED = "started"


@contextmanager
def beside_kernel_loop(model: Path, chunk_tokens: int) -> Iterator[None]:
    """Run the loop in a process of its own, on one thread, until the context is left."""
    command = [sys.executable, "-P", "-m", "benchmarks.fleets.kernel_loop", f"--model={model}"]
    added = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": SHORT_SPIN}
    process = subprocess.Popen(
        [*command, f"--chunk-tokens={chunk_tokens}"],
        env=os.environ | added | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != STARTED.encode():
            raise RuntimeError(f"the loop of kernels ended with {process.wait()}")
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


def compute(runner: ModelRunner, chunk_tokens: int) -> None:
    """Compute one prompt in chunks."""
    blocks = tuple(range(-(-PROMPT_TOKENS // BLOCK_TOKENS)))
    tokens = random.choices(range(runner.spec.vocab_size), k=PROMPT_TOKENS)
    for start in range(0, PROMPT_TOKENS, chunk_tokens):
        runner.run(StepBatch((Slice(tokens[start : start + chunk_tokens], start, blocks),)))


def main() -> None:
    options_parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options_parser.add_argument("--model", type=Path, required=True)
    options_parser.add_argument("--chunk-tokens", type=int, default=256)
    options = options_parser.parse_args()
    blocks = -(-PROMPT_TOKENS // BLOCK_TOKENS)
    runner = build_runner(options.model, EngineOptions(blocks=blocks, block_size=BLOCK_TOKENS))
    compute(runner, options.chunk_tokens)
    print(STARTED, flush=True)
    while True:
        compute(runner, options.chunk_tokens)


if __name__ == "__main__":
    main()
