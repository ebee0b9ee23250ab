"""The proof of the deterministic mode on this machine, with this model, before serving.

A text is computed in one step, in chunks, beside other sequences and as single tokens; every bit is
compared; on a device with graphs, by those too. Results of other machines are not relied on.
Keeps no state; the pool is used and left empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.runtime.errors import ConfigError
from baton.runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from baton.engine.execution.cuda_runner import CudaRunner

PROOF_TOKENS = 90  # more than an attention tile, if context and pool allow
_BESIDE_TOKENS = 17  # at most, in the sequence computed beside the chunks
SIZES_TOKENS = 1024
# The chunks that such a text is cut into, before its rest: tails of tiles, and both sides of a
# larger size.
CHUNK_SIZES = ((*range(1, 34, 2), 511), (*range(2, 33, 2), 512), (513, 511))
GRAPH_TOKENS = 256  # rows of the largest graph
_NAMED_TOKENS = 16  # covered by the digest, for pools of nearly every size
_GREEDY = SamplingParams(temperature=0.0)


def prove(runner: ModelRunner) -> str:
    """Compute a text in one step, and again in chunks beside other sequences and with one thread;
    and a longer one in chunks of many sizes. Returns a digest of the first text's logits; kernels
    with other bits, on another machine, have another digest.

    Writes into the first blocks of the pool, which must not be in use, and leaves them zero.
    Raises ConfigError if a bit differs.
    """
    tokens, first, second = _text(runner, PROOF_TOKENS)
    (expected,) = runner.all_logits(StepBatch((Slice(tokens, 0, first),)))
    chunks = list(_in_chunks(runner, tokens, first, second))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (alone,) = runner.all_logits(StepBatch((Slice(tokens, 0, first),)))
    finally:
        torch.set_num_threads(threads)
    same = torch.equal(torch.cat(chunks), expected) and torch.equal(alone, expected)
    _check(runner, same and _sizes_are_alike(runner))
    named = expected[:_NAMED_TOKENS].cpu().numpy()
    return blake2b(named.tobytes(), digest_size=16).hexdigest()


def prove_graphs(runner: CudaRunner) -> str:
    """Run `prove`, and check that every captured bucket writes the same KV and draws the same
    tokens as one eager step. Returns and raises like `prove`."""
    digest, eager = prove(runner.eager), runner.eager
    tokens, first, second = _text(eager, GRAPH_TOKENS)
    size, memory = eager.pool.block_size, eager.pool.memory
    wanted = eager.run(_singles(tokens, first, 0, len(tokens))).drawn
    same = True
    for bucket in runner.graphs.buckets:
        memory[second] = 0
        count = min(max(bucket, size), len(tokens))
        for start in range(0, count, bucket):
            end = min(start + bucket, count)
            found = runner.run(_singles(tokens, second, start, end)).drawn
            same = same and found == wanted[start:end]
        full = count // size
        same = same and torch.equal(memory[second[:full]], memory[first[:full]])
    _check(eager, same)
    return digest


def _singles(tokens: Sequence[int], blocks: Sequence[int], start: int, end: int) -> StepBatch:
    """Return a batch with one slice for each token from `start` to `end`, each with a draw."""
    return StepBatch(
        tuple(
            Slice([tokens[at]], at, blocks, (Draw(0, at + 1, _GREEDY),)) for at in range(start, end)
        )
    )


def _check(runner: ModelRunner, same: bool) -> None:
    """Zero the blocks that the proof wrote; raise ConfigError unless all bits were the `same`."""
    used = 2 * len(_text(runner, max(PROOF_TOKENS, SIZES_TOKENS))[1])
    runner.pool.memory[:used].zero_()
    if not same:
        raise ConfigError(
            "worker.deterministic: on this machine the results of a sequence of this model depend "
            "on the batch; serve without the setting"
        )


def _text(runner: ModelRunner, most: int) -> tuple[list[int], list[int], list[int]]:
    """Return at most `most` tokens, and two lists of blocks that hold them. Raises ConfigError if
    the pool is too small for two tokens."""
    size, vocab = runner.pool.block_size, runner.spec.vocab_size
    length = min(most, runner.max_context, runner.pool.blocks // 2 * size)
    if length < 2:
        raise ConfigError(
            f"pool.blocks is {runner.pool.blocks}: worker.deterministic needs two or more"
        )
    needed = -(-length // size)
    tokens = [(7919 * at + 13) % vocab for at in range(length)]
    return tokens, list(range(needed)), list(range(needed, 2 * needed))


def _sizes_are_alike(runner: ModelRunner) -> bool:
    """Return whether a longer text has the same bits in one step, in chunks of `CHUNK_SIZES`, and
    as single tokens in one step. Runs one layer of each kind: the others run the same kernels."""
    short = copy(runner)
    short.decoder = runner.decoder.shortened()
    tokens, first, second = _text(runner, SIZES_TOKENS)
    (expected,) = short.all_hidden(StepBatch((Slice(tokens, 0, first),)))
    for sizes in CHUNK_SIZES:
        ends = [end for end in accumulate(sizes) if end < len(tokens)]
        for start, end in zip([0, *ends], [*ends, len(tokens)], strict=True):
            piece = Slice(tokens[start:end], start, second)
            if not torch.equal(short.all_hidden(StepBatch((piece,)))[0], expected[start:end]):
                return False
    singles = [Slice([token], at, second) for at, token in enumerate(tokens)]
    return torch.equal(torch.cat(short.all_hidden(StepBatch(tuple(singles)))), expected)


def _in_chunks(
    runner: ModelRunner, tokens: Sequence[int], first: list[int], second: list[int]
) -> Iterator[Tensor]:
    """Yield logits [rows, vocab] of `tokens`, in blocks `second`: chunks of growing length and
    single tokens in alternation. Beside each runs the same text from its start, in `first`."""
    start, step = 0, 1
    while start < len(tokens):
        count = 1 if step % 2 else 5 * step
        piece = Slice(tokens[start : start + count], start, second)
        beside = Slice(tokens[: 1 + start % _BESIDE_TOKENS], 0, first)
        yield runner.all_logits(StepBatch((beside, piece)))[1]
        start, step = start + count, step + 1
