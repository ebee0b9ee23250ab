"""Loads one rank's share of a model and builds its decoder, on the leader and on other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.checkpoint.shards import Progress
from baton.engine.checkpoint.weights import load_weights
from baton.engine.cpu.linear import CpuMatrices
from baton.engine.deterministic.linear_invariant import with_invariant_linears
from baton.engine.execution import loading
from baton.engine.execution.cpu_kernels import cpu_kernels
from baton.engine.execution.deterministic_runner import invariant_kernels
from baton.engine.memory.host_memory import resident_bytes
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.weights import Weights
from baton.engine.ranks import logits_board
from baton.engine.ranks.logits_board import LogitsBoard
from baton.engine.ranks.rank_decoder import RankDecoder
from baton.engine.ranks.rank_options import RankOptions
from baton.engine.ranks.shared_allreduce import SharedAllReduce
from baton.engine.ranks.shared_memory import SharedMemory
from baton.engine.sampling.draw_plan import Sampler
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.engine.spec.rank_split import RankSplit, spec_of_rank


@dataclass(frozen=True, slots=True)
class RankParts:
    """The objects with which a rank computes a step."""

    decoder: RankDecoder
    pool: KvPool  # of the whole block
    board: LogitsBoard
    sums: SharedAllReduce
    commands: NDArray[np.uint8]  # the slots, in order
    sampler: Sampler
    dtype: torch.dtype  # of hidden states


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank's weights, before the pool's size is known."""

    options: RankOptions
    whole: ModelSpec
    spec: ModelSpec  # of the rank
    weights: Weights
    dtype: torch.dtype
    grown_bytes: int  # by which loading grew this process

    def with_pool(self, options: RankOptions, descriptors: list[int]) -> RankParts:
        """Map the shared memories and build the parts. `options.memory_bytes` has the sizes of the
        memories behind `descriptors`. Raises ConfigError if a kernel does not fit."""
        sizes = zip(descriptors, options.memory_bytes, strict=True)
        sums, commands, logits, blocks = [SharedMemory(*each) for each in sizes]
        split = RankSplit(options.ranks, options.rank)  # attention knows no groups
        reduce = SharedAllReduce(sums, options.ranks, options.rank)
        engine = options.engine
        pool = KvPool(
            self.whole,
            options.blocks,
            engine.block_size,
            self.dtype,
            quant=engine.kv_quant,
            memory=torch.from_numpy(blocks.array()),
        )
        mine = pool if self.whole.latent else pool.of_heads(split.kv_heads(self.whole.kv_heads))
        weights = self.weights
        if engine.deterministic:
            weights = with_invariant_linears(weights)
            kernels = invariant_kernels(self.spec, mine)
        else:
            kernels = cpu_kernels(engine.backend, self.spec, weights, mine, fused=False)
        tokens = split.share(self.whole.vocab_size)
        decoder = RankDecoder(self.spec, weights, kernels, tokens, reduce)
        board = LogitsBoard(logits, self.whole.vocab_size, reduce.meet)
        found = commands.array(), kernels.sampler, self.dtype
        return RankParts(decoder, pool, board, reduce, *found)


def load_rank(options: RankOptions, progress: Progress | None = None) -> LoadedRank:
    """Read the rank's share. Raises ModelError or ConfigError."""
    engine, split = options.engine, RankSplit(options.ranks, options.rank, options.ep)
    if engine.threads:
        torch.set_num_threads(engine.threads)
    whole = read_spec(options.folder, engine.max_context)
    spec = spec_of_rank(whole, split)
    dtype = loading.model_dtype(options.folder, whole, engine.dtype)
    before = resident_bytes()
    matrices = CpuMatrices(batch_invariant=engine.deterministic)
    quantization = engine.weight_quantization
    weights = load_weights(options.folder, whole, dtype, matrices, progress, quantization, split)
    grown = max(resident_bytes() - before, 0)
    return LoadedRank(options, whole, spec, weights, dtype, grown)


def board_bytes(vocab_size: int) -> int:
    return logits_board.memory_bytes(vocab_size)
