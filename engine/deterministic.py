"""The deterministic runner: a sequence's bits depend on the sequence alone.

Not on what else is in a step, on where a prompt is cut into chunks, on who computed the prefix
that a cache gave, or on the number of threads. Made of the invariant attention, products and
gate; everything else in the decoder works on one row, or one number, at a time. Before it is
handed out the runner must prove it on this machine, with this model. Keeps no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor

from baton.engine.attention_invariant import InvariantAttention
from baton.engine.batch import Slice, StepBatch
from baton.engine.gate_invariant import gate
from baton.engine.latent_invariant import InvariantLatentAttention
from baton.engine.linear_invariant import with_invariant_linears
from baton.engine.pool import KvPool
from baton.engine.runner import ModelRunner
from baton.engine.spec import ModelSpec
from baton.engine.weights import Weights
from baton.runtime.errors import ConfigError

_PROOF_TOKENS = 90  # more than a tile of the attention, if context and pool allow
_NAMED_TOKENS = 16  # whose logits the digest covers: the same for pools of nearly every size


def deterministic_runner(
    spec: ModelSpec, weights: Weights, pool: KvPool, max_context: int
) -> ModelRunner:
    """A proven runner; its `numerics` are equal where the bits are.

    Raises ConfigError if this machine's kernels do not keep to it, or cannot be had.
    """
    attention: InvariantAttention | InvariantLatentAttention
    if spec.latent is None:
        attention = InvariantAttention(pool, spec.attention)
    else:
        attention = InvariantLatentAttention(pool, spec.latent, spec.heads, spec.attention)
    gating = partial(gate, activation=spec.activation)
    runner = ModelRunner(
        spec, with_invariant_linears(weights), pool, attention, max_context, gating
    )
    runner.numerics = prove(runner)
    return runner


def prove(runner: ModelRunner) -> str:
    """Compute one text whole, and again in pieces beside other sequences and by one thread.
    Returns a digest of its logits' bits: other kernels, on another machine, give another.

    Writes into the first blocks of the pool, which must not be in use, and leaves them zero.
    Raises ConfigError if a bit differs.
    """
    size, vocab = runner.pool.block_size, runner.spec.vocab_size
    length = min(_PROOF_TOKENS, runner.max_context, runner.pool.blocks // 2 * size)
    if length < 2:
        raise ConfigError(
            f"pool.blocks is {runner.pool.blocks}: worker.deterministic needs two or more"
        )
    tokens = [(7919 * place + 13) % vocab for place in range(length)]
    needed = -(-length // size)
    first, second = list(range(needed)), list(range(needed, 2 * needed))
    (whole,) = runner.all_logits(StepBatch((Slice(tokens, 0, first),)))
    pieces = list(_in_pieces(runner, tokens, first, second))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (alone,) = runner.all_logits(StepBatch((Slice(tokens, 0, first),)))
    finally:
        torch.set_num_threads(threads)
    runner.pool.memory[: 2 * needed].zero_()
    if not torch.equal(torch.cat(pieces), whole) or not torch.equal(alone, whole):
        raise ConfigError(
            "worker.deterministic: on this machine the numbers of a sequence of this model depend "
            "on what is computed beside it; serve without the setting"
        )
    return blake2b(whole[:_NAMED_TOKENS].numpy().tobytes(), digest_size=16).hexdigest()


def _in_pieces(
    runner: ModelRunner, tokens: Sequence[int], first: list[int], second: list[int]
) -> Iterator[Tensor]:
    """Logits [rows, vocab] of `tokens`, in blocks `second`: chunks of growing length and single
    tokens in turn. Beside each runs the same text from its start, in blocks `first`."""
    start, step = 0, 1
    while start < len(tokens):
        count = 1 if step % 2 else 5 * step
        piece = Slice(tokens[start : start + count], start, second)
        beside = Slice(tokens[: start + 1], 0, first)
        yield runner.all_logits(StepBatch((beside, piece)))[1]
        start, step = start + count, step + 1
