"""The deterministic runner: a sequence's bits depend on the sequence alone.

Not on what else is in a step, on where a prompt is cut into chunks, on who computed the prefix
that a cache gave, or on the number of threads. Made of the invariant attention, products and
gate; everything else in the decoder works on one row, or one number, at a time. With bfloat16,
on a processor that has its instruction, these are the ordinary kernels but for the attention of
decode. Before it is handed out the runner must prove it on this machine, with this model. Keeps
no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from hashlib import blake2b
from itertools import accumulate

import torch
from torch import Tensor

from baton.engine.attention import TorchAttention
from baton.engine.attention_bf16 import usable
from baton.engine.attention_bf16_invariant import InvariantBfloatAttention
from baton.engine.attention_invariant import InvariantAttention
from baton.engine.batch import Slice, StepBatch
from baton.engine.families import Activation
from baton.engine.gate_invariant import gate
from baton.engine.latent_invariant import InvariantLatentAttention
from baton.engine.linear_invariant import with_invariant_linears
from baton.engine.pool import KvPool
from baton.engine.row_kernels import NumbaNorms, fits, silu_gate, warm_up
from baton.engine.runner import ModelRunner
from baton.engine.spec import ModelSpec
from baton.engine.weights import Weights
from baton.runtime.errors import ConfigError

_PROOF_TOKENS = 90  # more than a tile of the attention, if context and pool allow
_BESIDE_TOKENS = 17  # at most, in the sequence that is computed beside its pieces
_SIZES_TOKENS = 1024
# The pieces that such a text is cut into, before the rest of it: tails of tiles, and both sides of
# a larger size.
_SIZES = ((*range(1, 34, 2), 511), (*range(2, 33, 2), 512), (513, 511))
_NAMED_TOKENS = 16  # whose logits the digest covers: the same for pools of nearly every size


def deterministic_runner(
    spec: ModelSpec, weights: Weights, pool: KvPool, max_context: int
) -> ModelRunner:
    """A proven runner; its `numerics` are equal where the bits are.

    Raises ConfigError if this machine's kernels do not keep to it, or cannot be had.
    """
    linears, gating = with_invariant_linears(weights), partial(_gate, activation=spec.activation)
    warm_up()
    runner = ModelRunner(
        spec, linears, pool, _attention(spec, pool), max_context, gating, NumbaNorms()
    )
    runner.numerics = prove(runner)
    return runner


def _attention(spec: ModelSpec, pool: KvPool) -> InvariantLatentAttention | TorchAttention:
    if spec.latent is not None:
        return InvariantLatentAttention(pool, spec.latent, spec.heads, spec.attention)
    if usable(pool):
        return InvariantBfloatAttention(pool, spec.attention)
    return InvariantAttention(pool, spec.attention)


def _gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up, [rows, ffn], of `gate_up` [rows, 2 ffn]. Which kernel computes it does not
    depend on the number of rows."""
    if activation == "silu" and fits(gate_up, gate_up.shape[1] // 2):
        return silu_gate(gate_up)
    return gate(gate_up, activation)


def prove(runner: ModelRunner) -> str:
    """Compute one text whole, and again in pieces beside other sequences and by one thread; a
    longer one in pieces of many sizes. Returns a digest of the first one's logits' bits: other
    kernels, on another machine, give another.

    Writes into the first blocks of the pool, which must not be in use, and leaves them zero.
    Raises ConfigError if a bit differs.
    """
    tokens, first, second = _text(runner, _PROOF_TOKENS)
    (whole,) = runner.all_logits(StepBatch((Slice(tokens, 0, first),)))
    pieces = list(_in_pieces(runner, tokens, first, second))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (alone,) = runner.all_logits(StepBatch((Slice(tokens, 0, first),)))
    finally:
        torch.set_num_threads(threads)
    same = torch.equal(torch.cat(pieces), whole) and torch.equal(alone, whole)
    same = same and _sizes_are_alike(runner)
    used = 2 * len(_text(runner, max(_PROOF_TOKENS, _SIZES_TOKENS))[1])
    runner.pool.memory[:used].zero_()
    if not same:
        raise ConfigError(
            "worker.deterministic: on this machine the numbers of a sequence of this model depend "
            "on what is computed beside it; serve without the setting"
        )
    return blake2b(whole[:_NAMED_TOKENS].numpy().tobytes(), digest_size=16).hexdigest()


def _text(runner: ModelRunner, most: int) -> tuple[list[int], list[int], list[int]]:
    """At most so many tokens, and twice the blocks that hold them. Raises ConfigError if the
    pool is too small for two tokens."""
    size, vocab = runner.pool.block_size, runner.spec.vocab_size
    length = min(most, runner.max_context, runner.pool.blocks // 2 * size)
    if length < 2:
        raise ConfigError(
            f"pool.blocks is {runner.pool.blocks}: worker.deterministic needs two or more"
        )
    needed = -(-length // size)
    tokens = [(7919 * place + 13) % vocab for place in range(length)]
    return tokens, list(range(needed)), list(range(needed, 2 * needed))


def _sizes_are_alike(runner: ModelRunner) -> bool:
    """Whether a longer text gives the same bits in one step, in pieces of `_SIZES`, and as
    single tokens, all in one step. Of a few layers: the others take the same ways."""
    short = copy(runner)
    short.decoder = runner.decoder.of_each_kind()
    tokens, first, second = _text(runner, _SIZES_TOKENS)
    (whole,) = short.all_hidden(StepBatch((Slice(tokens, 0, first),)))
    for sizes in _SIZES:
        ends = [end for end in accumulate(sizes) if end < len(tokens)]
        for start, end in zip([0, *ends], [*ends, len(tokens)], strict=True):
            piece = Slice(tokens[start:end], start, second)
            if not torch.equal(short.all_hidden(StepBatch((piece,)))[0], whole[start:end]):
                return False
    singles = [Slice([token], place, second) for place, token in enumerate(tokens)]
    return torch.equal(torch.cat(short.all_hidden(StepBatch(tuple(singles)))), whole)


def _in_pieces(
    runner: ModelRunner, tokens: Sequence[int], first: list[int], second: list[int]
) -> Iterator[Tensor]:
    """Logits [rows, vocab] of `tokens`, in blocks `second`: chunks of growing length and single
    tokens in turn. Beside each runs the same text from its start, in blocks `first`."""
    start, step = 0, 1
    while start < len(tokens):
        count = 1 if step % 2 else 5 * step
        piece = Slice(tokens[start : start + count], start, second)
        beside = Slice(tokens[: 1 + start % _BESIDE_TOKENS], 0, first)
        yield runner.all_logits(StepBatch((beside, piece)))[1]
        start, step = start + count, step + 1
