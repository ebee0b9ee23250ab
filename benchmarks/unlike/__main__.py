"""Measure what KV loses and saves on its way to a worker that stores it in another dtype.

    python -m benchmarks.unlike [--json FILE]

bytes_share_PAIR      bytes that travel for a token, over those of a pair of bf16 workers
kv_error_PAIR         of the numbers that arrive, relative (norm over norm): the KV of a prompt of
                      255 tokens of the random model of `benchmarks.quantization`, bf16
logits_error_PAIR     of the next token's logits over that KV, against those in one bf16 worker
convert_gb_per_s_PAIR granter's bytes over the processor time of one thread

PAIR is granter_to_reader. Beside bf16_to_int8 stands what an int8 worker loses that computes all
itself (logits_error_int8_alone).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.memory.kv_conversion import conversion_to
from baton.engine.memory.kv_quant import KV_QUANTS
from baton.engine.scheduling.batch import Slice, StepBatch
from benchmarks.figures.report import Figure, parser, report
from benchmarks.quantization import TOKENS, error, small_model

BLOCK = 16
ROUNDS = 5


def runner_of(folder: Path, kv_dtype: str) -> ModelRunner:
    blocks = -(-TOKENS // BLOCK)
    options = EngineOptions(blocks=blocks, block_size=BLOCK, dtype="bfloat16", kv_dtype=kv_dtype)
    return build_runner(folder, options)


def numbers(runner: ModelRunner) -> Tensor:
    """Return the KV of all tokens, float32 [layer, block, head, k|v, token, head_dim]."""
    blocks = torch.arange(runner.pool.blocks)
    taken = [runner.pool.take(layer, blocks).float() for layer in range(runner.spec.layers)]
    return torch.stack(taken)[..., : TOKENS - 1, :]


def next_logits(runner: ModelRunner, tokens: Sequence[int]) -> Tensor:
    """Return the logits of the last token over the KV of those before it."""
    piece = Slice(tokens[-1:], len(tokens) - 1, range(runner.pool.blocks))
    (logits,) = runner.all_logits(StepBatch((piece,)))
    return logits.float()


def prefill(runner: ModelRunner, tokens: Sequence[int]) -> None:
    runner.run(StepBatch((Slice(tokens[:-1], 0, range(runner.pool.blocks)),)))


def pair_figures(folder: Path, granter: str, reader: str, tokens: Sequence[int]) -> list[Figure]:
    """Prefill in one pool, convert, and go on in the other."""
    plain, theirs, ours = (runner_of(folder, kind) for kind in ("auto", granter, reader))
    prefill(plain, tokens)
    prefill(theirs, tokens)
    conversion = conversion_to(theirs.pool, theirs.spec, ours.pool.kv_dtype)
    assert conversion is not None
    seconds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for block in range(theirs.pool.blocks):
            ours.pool.bytes_tensor()[block] = conversion.converted([block])[0]
        seconds.append(time.process_time() - started)
    name = "_to_".join("bf16" if kind == "auto" else kind for kind in (granter, reader))
    rate = theirs.pool.blocks * theirs.pool.block_bytes / min(seconds) / 1e9
    wanted = next_logits(plain, tokens)
    return [
        Figure(f"bytes_share_{name}", conversion.block_bytes / plain.pool.block_bytes),
        Figure(f"kv_error_{name}", error(numbers(ours), numbers(theirs))),
        Figure(f"logits_error_{name}", error(next_logits(ours, tokens), wanted)),
        Figure(f"convert_gb_per_s_{name}", rate),
    ]


def alone_figure(folder: Path, kind: str, tokens: Sequence[int]) -> Figure:
    plain, alone = runner_of(folder, "auto"), runner_of(folder, kind)
    for runner in (plain, alone):
        prefill(runner, tokens)
    lost = error(next_logits(alone, tokens), next_logits(plain, tokens))
    return Figure(f"logits_error_{kind}_alone", lost)


def measured(folder: Path) -> list[Figure]:
    generator = torch.Generator().manual_seed(3)
    model = small_model(folder)
    vocab = runner_of(model, "auto").spec.vocab_size
    tokens = torch.randint(vocab, (TOKENS,), generator=generator).tolist()
    made: list[Figure] = []
    for kind in KV_QUANTS:
        made += pair_figures(model, "auto", kind, tokens)
        made.append(alone_figure(model, kind, tokens))
        made += pair_figures(model, kind, "auto", tokens)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("What KV loses and saves between unlike workers").parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report(measured(Path(folder)), options.json)


if __name__ == "__main__":
    main()
