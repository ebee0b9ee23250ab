"""A part of `benchmarks.gpu`: steps that verify proposals, as graphs of rows x (k + 1).

Whether their tokens are those of plain decoding, what such a step costs beside one without
proposals, and what the decode worker makes of an oracle. Holds no state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from baton.engine.checkpoint.weights import load_weights
from baton.engine.execution.backend_choice import GpuBackend
from baton.engine.execution.cuda_runner import CudaRunner
from baton.engine.execution.device_runner import device_runner
from baton.engine.memory.kv_pool import KvPool
from baton.engine.scheduling.batch import Draw, FinishedStep, Slice, StepBatch
from baton.engine.scheduling.verification import with_proposals
from baton.engine.spec.model_spec import read_spec
from baton.engine.speculation.ngram_proposer import NgramProposer
from benchmarks.figures.report import Figure, at_least
from benchmarks.gpu_parts.models import (
    BLOCK_SIZE,
    GREEDY,
    decode_step,
    graph_seconds,
    sized_runner,
    table,
)
from benchmarks.gpu_parts.small_model import write_small_model
from benchmarks.gpu_parts.speed import Given, Skipped

PROPOSED = 3  # tokens a step and sequence
CONTEXT = 256  # of the small model's sequences
PROMPTS = ([5, 9, 100, 7] * 6, list(range(3, 60)), [11], [4, 4, 4, 4, 4, 8] * 3, [150, 20] * 9)
SHARE = 0.7  # of an oracle's proposals that are right

Propose = Callable[[int, Sequence[int]], Sequence[int]]  # sequence, its tokens


def speculation(given: Given) -> Iterator[Figure]:
    """Raises RuntimeError where proposals change a token."""
    yield from _tokens_equal(given)
    shapes = (("qwen3-0.6b", "06b", 1024), ("llama-8b", "8b", 4096))
    for name, label, context in shapes[:1] if given.dry else shapes:
        yield from _step_costs(given, name, label, 40 if given.dry else context)
    yield from _oracle(given)


def _tokens_equal(given: Given) -> Iterator[Figure]:
    count, prompts = (5, PROMPTS[2:4]) if given.dry else (64, PROMPTS)
    rows = len(prompts)
    with TemporaryDirectory() as folder:
        runner = _small_runner(Path(folder) / "model", given.device, rows)
    wanted = plain_tokens(runner, prompts, count)
    for name, propose in {
        "oracle": oracle_proposals(prompts, wanted),
        "ngram": ngram_proposals(prompts),
    }.items():
        found, accepted = verified_tokens(runner, prompts, count, propose)
        equal = sum(one == other for one, other in zip(found, wanted, strict=True))
        if equal < rows:
            raise RuntimeError(f"{name}: {equal} of {rows} sequences equal plain decoding's")
        beside = f"of {rows}; {accepted} of {rows * count} tokens were proposed"
        yield Figure(f"verified_sequences_equal_{name}", float(equal), "", beside, True)


def _small_runner(folder: Path, device: torch.device, rows: int) -> CudaRunner:
    write_small_model(folder, qk_norm=True)
    spec = read_spec(folder)
    weights = load_weights(folder, spec, torch.float32, GpuBackend(device).matrices())
    pool = KvPool(spec, rows * -(-CONTEXT // BLOCK_SIZE), BLOCK_SIZE, torch.float32, device)
    buckets = (8, 24)
    return device_runner(
        spec, weights, pool, max_context=CONTEXT, max_rows=max(buckets), buckets=buckets
    )


def plain_tokens(
    runner: CudaRunner, prompts: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """Answers of `count` tokens, greedily, one token of each sequence a step."""
    return verified_tokens(runner, prompts, count, lambda sequence, tokens: ())[0]


def verified_tokens(
    runner: CudaRunner, prompts: Sequence[Sequence[int]], count: int, propose: Propose
) -> tuple[list[list[int]], int]:
    """Answers of `count` tokens with what `propose` gives, and how many of them were proposed.
    Raises RuntimeError if a step after the prompts runs without a graph."""
    texts = [list(prompt) for prompt in prompts]
    for row, text in enumerate(texts):
        draw = Draw(0, len(text), GREEDY)
        first = runner.run(StepBatch((Slice(text, 0, table(row, CONTEXT), (draw,)),)))
        text.append(first.drawn[0][0].token)
    ends = [len(prompt) + count for prompt in prompts]
    accepted = 0
    while open_rows := [row for row, text in enumerate(texts) if len(text) < ends[row]]:
        slices = []
        for row in open_rows:
            left = ends[row] - len(texts[row]) - 1
            slices.append(_verifying(row, texts[row], propose(row, texts[row])[:left]))
        running = runner.start(StepBatch(tuple(slices)))
        if isinstance(running, FinishedStep):
            raise RuntimeError(f"a step of {sum(len(x.tokens) for x in slices)} rows has no graph")
        for row, drawn in zip(open_rows, running.result().drawn, strict=True):
            texts[row] += [each.token for each in drawn]
            accepted += len(drawn) - 1
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)], accepted


def _verifying(row: int, text: list[int], proposals: Sequence[int]) -> Slice:
    known = len(text)
    draws = tuple(Draw(0, known + at, GREEDY) for at in range(len(proposals) + 1))
    item = Slice(text[-1:], known - 1, table(row, CONTEXT), draws)
    return with_proposals(item, proposals) if proposals else item


def oracle_proposals(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Propose:
    """Proposals of which every fourth token is wrong; `answers` follow `prompts`."""

    def propose(sequence: int, text: Sequence[int]) -> list[int]:
        at = len(text) - len(prompts[sequence])
        right = answers[sequence][at : at + PROPOSED]
        return [token ^ ((at + index) % 4 == 3) for index, token in enumerate(right)]

    return propose


def ngram_proposals(prompts: Sequence[Sequence[int]]) -> Propose:
    states = [NgramProposer().start(b"", prompt) for prompt in prompts]
    known = [len(prompt) for prompt in prompts]

    def propose(sequence: int, text: Sequence[int]) -> list[int]:
        states[sequence].extend(text[known[sequence] :])
        known[sequence] = len(text)
        return states[sequence].propose(PROPOSED)

    return propose


def _step_costs(given: Given, name: str, label: str, context: int) -> Iterator[Figure]:
    """The graph of rows x (k + 1) over that of rows x 1, replayed in turns."""
    counts = (1,) if given.dry else (1, 8, 64)
    buckets = tuple(sorted({rows * each for rows in counts for each in (1, PROPOSED + 1)}))
    wide, shape = context + 16, given.shape(name)
    runner = sized_runner(shape, given.device, rows=max(counts), context=wide, buckets=buckets)
    for rows in counts:
        plain: list[float] = []
        verified: list[float] = []
        for _ in range(1 if given.dry else 3):
            for times, proposed in ((plain, 0), (verified, PROPOSED)):
                step = decode_step(rows, context, wide, fed=False)
                runner.run(batch_with_proposals(step, proposed))
                bucket = rows * (proposed + 1)
                times.append(graph_seconds(runner, bucket, 1 if given.dry else 4, given.device))
        ratio = median(verified) / median(plain)
        beside = f"{median(verified) * 1e3:.3f} over {median(plain) * 1e3:.3f} ms"
        yield Figure(f"verify_cost_{label}_bs{rows}_k{PROPOSED}", ratio, "", beside)


def batch_with_proposals(batch: StepBatch, count: int) -> StepBatch:
    """Return the batch with `count` proposals in each slice, right or wrong."""
    if not count:
        return batch
    slices = []
    for item in batch.slices:
        draws = tuple(Draw(0, item.start + 1 + at, GREEDY) for at in range(count + 1))
        whole = Slice(item.tokens, item.start, item.blocks, draws)
        slices.append(with_proposals(whole, [3 + at for at in range(count)]))
    return StepBatch(tuple(slices))


def _oracle(given: Given) -> Iterator[Figure]:
    """A decode worker at batch 1 whose proposals are right in `SHARE` of all cases."""
    try:
        from benchmarks.gpu_parts.oracle import oracle_speedup
    except ImportError as error:  # of the simulation's packages
        raise Skipped(f"an oracle's speed-up needs more packages: {error}") from error
    speedup, ratio = asyncio.run(oracle_speedup(given, SHARE, PROPOSED))
    label = round(10 * SHARE)
    yield Figure(f"oracle_speedup_a{label}_k{PROPOSED}", speedup, "", "of the 0.6 B, batch 1")
    yield at_least(f"speedup_over_formula_a{label}", ratio, 0.9)
