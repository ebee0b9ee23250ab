"""The cost of splitting a model over the processes of one host.

    python -m benchmarks.tensor_parallel [--rounds N] [--quick] [--json FILE]

The random bf16 model of 0.45 billion parameters, once in one process with two threads and once over
two ranks with one thread each, on the same two cores. A round runs the same step on both, one after
the other, and swaps their order; a figure is the median of the rounds' ratios. Some minutes.

decode_step_ratio_tp2  time of two ranks over one process: a token of each of 8 sequences
prefill_ratio_tp2      the same for a prompt of 256 tokens in one step, in a third of the rounds
allreduce_over_gloo    time of a sum of [32, 1024] float32 numbers over two processes, in shared
                       memory over gloo's
memory_share_tp2       weights and KV of one rank over those of the whole model
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.ranks.loading import build_rank_runner
from baton.engine.ranks.shared_allreduce import SharedAllReduce
from baton.engine.ranks.shared_memory import SharedMemory
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.models.embedded import embedded_model
from baton.runtime.sampling import SamplingParams
from benchmarks.figures.report import Figure, at_most, parser, report
from benchmarks.inputs.cached_model import cached_model

RANKS = 2
PROMPT_TOKENS = 256
CONTEXT_TOKENS = 512
BATCH = 8
BLOCK_TOKENS = 16
BLOCKS = BATCH * (CONTEXT_TOKENS // BLOCK_TOKENS + 1) + PROMPT_TOKENS // BLOCK_TOKENS
ROUNDS = 9
WARM_UP = 1  # rounds
SUM_ROUNDS = 200
GREEDY = SamplingParams(temperature=0.0)


def steps(vocab: int) -> dict[str, StepBatch]:
    """The steps by name, on blocks in random order."""
    chooser = random.Random(0)
    order = chooser.sample(range(BLOCKS), BLOCKS)
    prompt = chooser.choices(range(vocab), k=PROMPT_TOKENS)
    held = PROMPT_TOKENS // BLOCK_TOKENS
    each = CONTEXT_TOKENS // BLOCK_TOKENS + 1
    tables = [order[start : start + each] for start in range(held, BLOCKS, each)]
    draw = (Draw(0, CONTEXT_TOKENS + 1, GREEDY),)
    decoding = [Slice([number], CONTEXT_TOKENS, table, draw) for number, table in enumerate(tables)]
    first = (Draw(0, PROMPT_TOKENS, GREEDY),)
    return {
        "decode_step": StepBatch(tuple(decoding)),
        "prefill": StepBatch((Slice(prompt, 0, order[:held], first),)),
    }


def ratios(runners: Sequence[tuple[ModelRunner, int]], rounds: int) -> dict[str, list[float]]:
    """Return, for each step, the second runner's time over the first one's. A runner comes with
    the number of its threads in this process."""
    found: dict[str, list[float]] = {}
    for name, batch in steps(runners[0][0].spec.vocab_size).items():
        for number in range(-WARM_UP, rounds if name == "decode_step" else -(-rounds // 3)):
            seconds = [0.0, 0.0]
            for index in (0, 1) if number % 2 else (1, 0):
                runner, threads = runners[index]
                torch.set_num_threads(threads)
                started_s = time.perf_counter()
                result = runner.run(batch)
                seconds[index] = time.perf_counter() - started_s
                assert not result.broken and not result.failed
            if number >= 0:
                found.setdefault(name, []).append(seconds[1] / seconds[0])
    return found


def sums() -> dict[str, float]:
    """Microseconds of a sum over two processes, in shared memory and by gloo."""
    memory = SharedMemory.create(SharedAllReduce.memory_bytes(RANKS))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.fleets.rank_sums"]
    started = [
        subprocess.Popen(
            [*command, *map(str, (rank, RANKS, memory.descriptor, port, SUM_ROUNDS))],
            pass_fds=[memory.descriptor],
            stdout=subprocess.PIPE,
        )
        for rank in range(RANKS)
    ]
    printed = [process.communicate(timeout=300)[0] for process in started]
    if codes := [process.returncode for process in started if process.returncode]:
        raise RuntimeError(f"ranks of the sums ended with codes {codes}: see their output")
    found: dict[str, float] = json.loads(printed[0])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    folder = embedded_model() if options.quick else cached_model()
    one, two = load(folder)
    try:
        found = ratios([(one, RANKS), (two, 1)], options.rounds)
    finally:
        two.close()
    assert one.memory is not None and two.memory is not None
    whole = one.memory.weights_bytes + one.memory.pool_bytes
    share = (two.memory.weights_bytes + two.memory.pool_bytes) / RANKS / whole
    micro = sums()
    made = [
        _ratio("decode_step_ratio_tp2", found["decode_step"], 1.15),
        _ratio("prefill_ratio_tp2", found["prefill"], 1.10),
        at_most("allreduce_over_gloo", micro["shared"] / micro["gloo"], 0.2),
        Figure("allreduce_us", micro["shared"], "us", f"gloo: {micro['gloo']:.4g} us"),
        at_most("memory_share_tp2", share, 0.55),
    ]
    report(made, options.json)


def load(folder: Path) -> tuple[ModelRunner, ModelRunner]:
    """The model in this process, and over ranks that this process leads; KV in both pools."""
    torch.set_num_threads(RANKS)
    options = EngineOptions(blocks=BLOCKS, block_size=BLOCK_TOKENS, dtype="bfloat16")
    one = build_runner(folder, options)
    two = build_rank_runner(folder, RANKS, replace(options, threads=1))
    for runner in (one, two):
        runner.pool.tensor.normal_()
    return one, two


def _ratio(name: str, found: list[float], limit: float) -> Figure:
    median = statistics.median(found)
    beside = f"limit: at most {limit:g}; {min(found):.3f} to {max(found):.3f}"
    return Figure(name, median, "", beside, median <= limit)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("The cost of splitting a model over the processes of one host")
    made.add_argument("--rounds", type=int, default=ROUNDS)
    made.add_argument("--quick", action="store_true", help="with the embedded model")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
