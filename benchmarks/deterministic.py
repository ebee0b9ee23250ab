"""Measure the cost of `worker.deterministic` on a CPU.

    python -m benchmarks.deterministic [--rounds N] [--threads N] [--quick] [--json FILE]

One process; the random bf16 model of `benchmarks.engine_cpu`, loaded twice: as `baton serve` loads
it, and deterministic. A round runs the same steps on both, one after the other, and turns the
order about; a figure is the median over rounds of a round's ratio.

deterministic_cost_prefill_1024  step time with over without: a prompt of 1,024 tokens, one step
deterministic_cost_decode_bs32   the same for a token of each of 32 sequences after 512 tokens
deterministic_cost_decode_bs1    and of one sequence
deterministic_cpu_cost_...       the same of the processor time of all threads, which other
                                 programs on the machine disturb less
deterministic_load_s             what the mode adds to loading: the measuring of matrices, and the
                                 proof
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.models.embedded import embedded_model
from baton.runtime.sampling import SamplingParams
from benchmarks.figures.report import Figure, parser, report
from benchmarks.inputs.cached_model import cached_model

PROMPT_TOKENS = 1024
CONTEXT_TOKENS = 512
BATCH = 32
BLOCK_TOKENS = 16
BLOCKS = BATCH * (CONTEXT_TOKENS // BLOCK_TOKENS + 1)
ROUNDS = 9
GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class StepTimes:
    """Seconds, one a round, each without the mode and with it."""

    wall: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    cpu: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))


def steps(vocab: int) -> dict[str, StepBatch]:
    """The steps by name, on blocks in random order."""
    chooser = random.Random(0)
    order = chooser.sample(range(BLOCKS), BLOCKS)
    prompt = chooser.choices(range(vocab), k=PROMPT_TOKENS)
    draw = (Draw(0, PROMPT_TOKENS, GREEDY),)
    each = CONTEXT_TOKENS // BLOCK_TOKENS + 1
    tables = [order[start : start + each] for start in range(0, BLOCKS, each)]
    decoding = tuple(
        Slice([number], CONTEXT_TOKENS, table, draw) for number, table in enumerate(tables)
    )
    return {
        "prefill_1024": StepBatch(
            (Slice(prompt, 0, order[: PROMPT_TOKENS // BLOCK_TOKENS], draw),)
        ),
        "decode_bs32": StepBatch(decoding),
        "decode_bs1": StepBatch(decoding[:1]),
    }


def run(runners: Sequence[ModelRunner], rounds: int) -> dict[str, StepTimes]:
    """`runners` are the one without the mode and the one with it."""
    batches = steps(runners[0].spec.vocab_size)
    times = {name: StepTimes() for name in batches}
    for number in range(-1, rounds):
        for name, batch in batches.items():
            for index in (0, 1) if number % 2 else (1, 0):
                wall, cpu = _timed(runners[index], batch)
                if number >= 0:
                    times[name].wall[index].append(wall)
                    times[name].cpu[index].append(cpu)
    return times


def _timed(runner: ModelRunner, batch: StepBatch) -> tuple[float, float]:
    """Seconds by the clock, and of the processors."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = runner.run(batch)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert not result.broken and not result.failed
    return wall, cpu


def figures(times: dict[str, StepTimes], load_s: float) -> list[Figure]:
    made = [_cost(f"deterministic_cost_{name}", found.wall) for name, found in times.items()]
    made += [_cost(f"deterministic_cpu_cost_{name}", found.cpu) for name, found in times.items()]
    rounds = min(len(found.wall[0]) for found in times.values())
    return [*made, Figure("deterministic_load_s", load_s, "s"), Figure("rounds", rounds)]


def _cost(name: str, seconds: tuple[list[float], list[float]]) -> Figure:
    ratios = [b / a for a, b in zip(*seconds, strict=True)]
    without, with_mode = (statistics.median(each) * 1e3 for each in seconds)
    beside = f"{min(ratios):.3f} to {max(ratios):.3f}; {with_mode:.4g} over {without:.4g} ms"
    return Figure(name, statistics.median(ratios), "", beside)


def load(folder: Path) -> tuple[list[ModelRunner], float]:
    """Both runners, with KV in their pools, and how much longer the second took to load."""
    runners, seconds = [], []
    for deterministic in (False, True):
        start = time.perf_counter()
        runner = build_runner(
            folder,
            EngineOptions(
                blocks=BLOCKS,
                block_size=BLOCK_TOKENS,
                dtype="bfloat16",
                deterministic=deterministic,
            ),
        )
        seconds.append(time.perf_counter() - start)
        runner.pool.tensor.normal_()
        runners.append(runner)
    return runners, seconds[1] - seconds[0]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    runners, load_s = load(embedded_model() if options.quick else cached_model())
    report(figures(run(runners, options.rounds), load_s), options.json)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("What the deterministic mode costs on a CPU")
    made.add_argument("--rounds", type=int, default=ROUNDS)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--quick", action="store_true", help="the small embedded model instead")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
