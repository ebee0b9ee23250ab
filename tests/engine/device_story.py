"""Greedy tokens of a small random model: on a device with graphs and kernels, and on the CPU.

    TRITON_INTERPRET=1 python -P tests/engine/device_story.py FOLDER --device cpu
    python -P tests/engine/device_story.py FOLDER --device cuda

FOLDER holds a model. Prompts go in chunks, then all sequences decode together, every step
started before the one before it is over. Prints one JSON list: whether each sequence is equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

from baton.engine.checkpoint.weights import load_weights
from baton.engine.execution.cuda_runner import CudaRunner
from baton.engine.execution.device_runner import device_runner
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.gpu_loading import Build, CudaMemory, sized_runner
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KV_QUANTS
from baton.engine.memory.memory_plan import PoolForm
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.engine.scheduling.token_history import PromptTokens, Text
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.engine.triton.matrices import TritonMatrices
from baton.runtime.sampling import SamplingParams

sys.path.append(str(Path(__file__).parent))
from interpreter import patch_once_a_launch

BLOCKS, SIZE = 64, 16
RULES = (
    SamplingParams(temperature=0.0),
    SamplingParams(1.1, top_k=9, top_p=0.9, seed=4),
    SamplingParams(
        temperature=0.0,
        repetition_penalty=1.5,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        logit_bias=((5, 0.5), (7, -0.5)),
        top_logprobs=3,
    ),
)


def tokens(
    runner: object, lengths: list[int], steps: int, vocab: int
) -> list[tuple[list[int], list[list[int]]]]:
    """What each sequence draws, and the best tokens beside each; the runner has `start`, or only
    `run`."""
    start = getattr(runner, "start", None)
    free = list(range(BLOCKS))[::-1]
    slices, drawn, best = [], [[] for _ in lengths], [[] for _ in lengths]
    for index, length in enumerate(lengths):
        torch.manual_seed(index)
        prompt = torch.randint(0, vocab, (length,)).tolist()
        table = [free.pop() for _ in range(-(-(length + steps + 1) // SIZE))]
        params = RULES[index % len(RULES)]
        first = length // 2
        runner.run(StepBatch((Slice(prompt[:first], 0, table),)))
        text = Text(PromptTokens(prompt), drawn[index])
        last = Slice(prompt[first:], first, table, (_draw(length, params, text),))
        result = runner.run(StepBatch((last,)))
        drawn[index].append(result.drawn[0][0].token)
        slices.append((length, table, params, text))
    before = None
    for step in range(steps):
        batch = StepBatch(
            tuple(
                Slice(
                    [0 if step else drawn[index][-1]],
                    length + step,
                    table,
                    (_draw(length + step + 1, params, text),),
                    feed=index if step else None,
                )
                for index, (length, table, params, text) in enumerate(slices)
            )
        )
        under_way = start(batch) if start else runner.run(batch)
        for done in [before] if step else []:
            _take(done, drawn, best)
        before = under_way
    _take(before, drawn, best)
    return list(zip(drawn, best, strict=True))


def _draw(position: int, params: SamplingParams, text: Text) -> Draw:
    """A draw that knows of the text what has been taken."""
    history = text.until(len(text.output)) if params.needs_history else None
    return Draw(0, position, params, history)


def _take(done: object, drawn: list[list[int]], best: list[list[list[int]]]) -> None:
    result = done.result() if hasattr(done, "result") else done
    for index, each in enumerate(result.drawn):
        drawn[index].append(each[0].token)
        best[index].append([token for token, _ in each[0].top])


def torch_runner(
    folder: Path, kv_dtype: str, quantization: str = "none", block_size: int = SIZE
) -> ModelRunner:
    """What a device is held against: the model in float32 on torch, on the CPU."""
    return build_runner(
        folder,
        EngineOptions(
            blocks=BLOCKS,
            block_size=block_size,
            dtype="float32",
            backend="torch",
            kv_dtype=kv_dtype,
            quantization=quantization,
        ),
    )


class Counted:
    """Memory of which each look finds a sixteenth less, where the device cannot be asked."""

    def __init__(self) -> None:
        self.left = self.total = 1 << 30

    def free(self) -> int:
        self.left -= self.left // 16
        return self.left

    def held(self) -> int:
        return self.total - self.left

    def release(self) -> None: ...


def sized(spec: ModelSpec, build: Build, device: torch.device, kv_dtype: str) -> CudaRunner:
    """A runner whose pool is sized as `build_engine` sizes it, from memory for `BLOCKS` or so."""
    memory = CudaMemory(device) if device.type == "cuda" else Counted()
    codes = KV_QUANTS.get(kv_dtype)
    options = EngineOptions(
        block_size=SIZE,
        max_context=128,
        memory_fraction=0.01,
        max_rows=8,
        step_tokens=4,
        kv_dtype=kv_dtype,
    )
    size = partial(KvPool, spec, block_size=SIZE, dtype=torch.float32, device=device, quant=codes)
    form = PoolForm(spec, SIZE, torch.float32, codes)
    runner = sized_runner(form, options, lambda n: size(n), build, memory, 1)
    assert runner.memory is not None and runner.memory.beside_bytes > 0
    assert runner.pool.blocks >= BLOCKS
    return runner


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sized", action="store_true", help="the pool by measured memory")
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", *KV_QUANTS))
    given = parser.parse_args()
    patch_once_a_launch()
    device = torch.device(given.device)
    spec = read_spec(given.folder)
    weights = load_weights(given.folder, spec, torch.float32, TritonMatrices(device))
    buckets = (4,) if given.device == "cpu" else (1, 2, 8)
    build = partial(device_runner, spec, weights, max_rows=8, buckets=buckets, max_context=128)
    if given.sized:
        ours = sized(spec, build, device, given.kv_dtype)
    else:
        codes = KV_QUANTS.get(given.kv_dtype)
        ours = build(KvPool(spec, BLOCKS, SIZE, torch.float32, device, codes))
    unwritten = ours.pool.tensor if ours.pool.scales is None else ours.pool.scales
    unwritten.fill_(float("nan"))
    plain = torch_runner(given.folder, given.kv_dtype)
    lengths = [9, 20, 2] if given.device == "cpu" else [9, 30, 2, 77, 16]
    found = tokens(ours, lengths, given.steps, spec.vocab_size)
    wanted = tokens(plain, lengths, given.steps, spec.vocab_size)
    print(json.dumps([a == b for a, b in zip(found, wanted, strict=True)]))
    return 0 if found == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
