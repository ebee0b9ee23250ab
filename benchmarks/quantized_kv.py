"""Measure the error and the time of KV in eight bits, against the same model with bf16 KV.

    python -m benchmarks.quantized_kv [--rounds N] [--threads N] [--quick] [--json FILE]

attention_error_KIND   of the output of 16 heads over 8 KV heads of 128 and 512 tokens of normal
                       numbers, relative (norm over norm); `_chunk` for a chunk's last 64 tokens.
                       bf16 is against float32, the others against bf16
logits_error_KIND      of the logits of the model of `benchmarks.quantization` over 256 tokens,
                       against those of bf16 KV; float32 is all of that model in float32, beside
                       which the others' are to be read
greedy_agree_KIND      share of those 256 positions where the likeliest token is the same
greedy_steps_KIND      tokens that 8 of its sequences draw alike, of 64 each, before another one
step_ms_KIND           a decode step of 32 sequences with 512 tokens each; over bf16's beside it
prefill_ms_KIND        a prompt of 1,024 tokens
kv_bytes_token_KIND    of the pool, for each token

Times are of the random Qwen3-shaped bf16 model of 0.45 B parameters (inputs/cached_model.py).
Kinds take turns in each round; of five calls in a row the fastest counts, of rounds the median.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.cpu.attention_kv_quant import KvQuantAttention
from baton.engine.cpu.attention_numba import NumbaAttention
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KV_QUANTS
from baton.engine.model.attention import TorchAttention
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.engine.spec.model_spec import AttentionSpec, ModelSpec
from baton.models.embedded import embedded_model
from benchmarks.engine_cpu import GREEDY, SPIN
from benchmarks.figures.report import Figure, parser, report
from benchmarks.inputs.cached_model import cached_model
from benchmarks.quantization import TOKENS, error, small_model

KINDS = ("auto", *KV_QUANTS)
BLOCK = 16
CONTEXT = 512
BATCH = 32
PROMPT = 1024
STEPS = 64
SEQUENCES = 8
CALLS = 5


def name_of(kind: str) -> str:
    return "bf16" if kind == "auto" else kind


def attention_figures(spec: ModelSpec) -> list[Figure]:
    """`spec` gives heads and layers; the numbers are normal ones."""
    torch.manual_seed(0)
    blocks = CONTEXT // BLOCK
    kv = torch.randn(CONTEXT, spec.kv_heads, 2, spec.head_dim).to(torch.bfloat16)
    queries = torch.randn(65, spec.heads, spec.head_dim).to(torch.bfloat16)
    form = AttentionSpec(spec.head_dim**-0.5, (0,) * spec.layers)
    table = random.Random(0).sample(range(blocks), blocks)
    ends = (Slice([1], CONTEXT - 1, table), Slice([1] * 64, CONTEXT - 64, table))
    layout = lay_out(StepBatch(ends), Bounds(blocks, BLOCK, 9, CONTEXT))
    positions = torch.arange(CONTEXT)
    wanted: Tensor | None = None
    made: list[Figure] = []
    for kind in ("exact", *KINDS):
        dtype = torch.float32 if kind == "exact" else torch.bfloat16
        pool = KvPool(spec, blocks, BLOCK, dtype, quant=KV_QUANTS.get(kind))
        pool.put(0, torch.tensor(table)[positions // BLOCK], positions % BLOCK, kv.to(dtype))
        backend = {"exact": TorchAttention, "auto": NumbaAttention}.get(kind, KvQuantAttention)
        found = backend(pool, form).attend(0, queries.to(dtype), layout)
        if wanted is not None:
            name = f"attention_error_{name_of(kind)}"
            made.append(Figure(name, error(found[0], wanted[0])))
            made.append(Figure(f"{name}_chunk", error(found[1:], wanted[1:])))
        if wanted is None or kind == "auto":
            wanted = found
    return made


def exactness_figures(folder: Path) -> list[Figure]:
    model = small_model(folder / "model")
    kinds = {kind: ("bfloat16", kind) for kind in KINDS} | {"float32": ("float32", "auto")}
    blocks = SEQUENCES * ((64 + STEPS) // BLOCK + 1)
    whole = StepBatch((Slice(_text(TOKENS, 0), 0, list(range(TOKENS // BLOCK))),))
    logits, drawn = {}, {}
    for kind, (dtype, kv_dtype) in kinds.items():
        runner = build_runner(
            model, EngineOptions(blocks=blocks, block_size=BLOCK, dtype=dtype, kv_dtype=kv_dtype)
        )
        logits[kind], drawn[kind] = runner.all_logits(whole)[0], _greedy(runner)
    made = []
    for kind in ("float32", *KV_QUANTS):
        same = logits[kind].argmax(-1) == logits["auto"].argmax(-1)
        pairs = zip(drawn[kind], drawn["auto"], strict=True)
        alike = statistics.mean(common_length(mine, theirs) for mine, theirs in pairs)
        made += [
            Figure(f"logits_error_{kind}", error(logits[kind], logits["auto"])),
            Figure(f"greedy_agree_{kind}", float(same.float().mean())),
            Figure(f"greedy_steps_{kind}", alike, "", f"of {STEPS}"),
        ]
    return made


def _greedy(runner: ModelRunner) -> list[list[int]]:
    """`STEPS` tokens of each of `SEQUENCES`, after 64 of text."""
    each = (64 + STEPS) // BLOCK + 1
    todo = [_text(64, seed) for seed in range(SEQUENCES)]
    out: list[list[int]] = [[] for _ in range(SEQUENCES)]
    start = 0
    for _ in range(STEPS):
        end = start + len(todo[0])
        draws = (Draw(0, end, GREEDY),)
        slices = [
            Slice(tokens, start, list(range(n * each, (n + 1) * each)), draws)
            for n, tokens in enumerate(todo)
        ]
        todo = [[found[0].token] for found in runner.run(StepBatch(tuple(slices))).drawn]
        start = end
        for known, new in zip(out, todo, strict=True):
            known += new
    return out


def _text(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(2000), k=tokens)


class KvQuantBench:
    """A runner of each kind, over one model, for times."""

    def __init__(self, quick: bool) -> None:
        folder = embedded_model() if quick else cached_model()
        self._blocks = BATCH * (CONTEXT // BLOCK + 1)
        self.runners = {
            kind: build_runner(
                folder,
                EngineOptions(
                    blocks=self._blocks, block_size=BLOCK, dtype="bfloat16", kv_dtype=kind
                ),
            )
            for kind in KINDS
        }
        self.spec = self.runners["auto"].spec
        self._order = random.Random(0).sample(range(self._blocks), self._blocks)

    def times(self, rounds: int) -> list[Figure]:
        steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
        prompts: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for runner in self.runners.values():
            self._fill(runner)
        for turn in range(rounds + 1):
            for kind, runner in self.runners.items():
                step, prompt = self._fastest(runner, self._decodes()), self._prompt()
                taken = self._fastest(runner, prompt, calls=2)
                if turn:  # the first warms up
                    steps[kind].append(1e3 * step)
                    prompts[kind].append(1e3 * taken)
        made = []
        for name, found in (("step_ms", steps), ("prefill_ms", prompts)):
            for kind, values in found.items():
                ratios = [a / b for a, b in zip(values, found["auto"], strict=True)]
                beside = f"{statistics.median(ratios):.3f} of bf16's"
                figure = f"{name}_{name_of(kind)}"
                made.append(Figure(figure, statistics.median(values), "ms", beside))
        for kind, runner in self.runners.items():
            each = runner.pool.block_bytes / BLOCK
            made.append(Figure(f"kv_bytes_token_{name_of(kind)}", each, "B"))
        return made

    def _fill(self, runner: ModelRunner) -> None:
        """All blocks with the rows of one text; `BATCH` sequences are that text many times."""
        each, memory = CONTEXT // BLOCK, runner.pool.memory
        runner.run(StepBatch((Slice(_text(CONTEXT, 1), 0, list(range(each))),)))
        for first in range(each, self._blocks, each):
            memory[first : first + each] = memory[:each]

    def _decodes(self) -> StepBatch:
        each = CONTEXT // BLOCK + 1
        draws = (Draw(0, CONTEXT + 1, GREEDY),)
        tables = (self._order[n * each : (n + 1) * each] for n in range(BATCH))
        return StepBatch(tuple(Slice([n], CONTEXT, table, draws) for n, table in enumerate(tables)))

    def _prompt(self) -> StepBatch:
        blocks = self._order[: PROMPT // BLOCK]
        draws = (Draw(0, PROMPT, GREEDY),)
        return StepBatch((Slice(_text(PROMPT, 3), 0, blocks, draws),))

    def _fastest(self, runner: ModelRunner, batch: StepBatch, calls: int = CALLS) -> float:
        taken = []
        for _ in range(calls):
            begun = time.perf_counter()
            result = runner.run(batch)
            taken.append(time.perf_counter() - begun)
            assert not result.broken
        return min(taken)


def common_length(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many tokens are equal before the first that is not."""
    pairs = enumerate(zip(mine, theirs, strict=True))
    return next((index for index, (a, b) in pairs if a != b), len(mine))


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if any(os.environ.get(name) != value for name, value in SPIN.items()):
        again = [sys.executable, "-m", "benchmarks.quantized_kv", *(arguments or sys.argv[1:])]
        os.execve(sys.executable, again, os.environ | SPIN)
    torch.set_num_threads(options.threads)
    bench = KvQuantBench(options.quick)
    with tempfile.TemporaryDirectory() as folder:
        exactness = exactness_figures(Path(folder))
    found = attention_figures(bench.spec) + exactness + bench.times(options.rounds)
    report(found, options.json)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("What KV in eight bits costs")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--quick", action="store_true", help="times of the embedded model")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
