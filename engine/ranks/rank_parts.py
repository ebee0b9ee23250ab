"""Loads one rank's share of a model and builds its decoder, on the leader and on other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.checkpoint.shards import Progress
from baton.engine.checkpoint.weights import load_weights
from baton.engine.execution import loading
from baton.engine.execution.backend_choice import CpuBackend
from baton.engine.execution.draft_loading import DraftSource, draft_source
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
from baton.engine.spec.rank_split import RankSplit, divides, spec_of_rank


@dataclass(frozen=True, slots=True)
class RankParts:
    """The objects with which a rank computes a step."""

    decoder: RankDecoder
    draft: RankDecoder | None  # of a draft model that is split over the ranks
    pool: KvPool  # of the whole block
    board: LogitsBoard
    sums: SharedAllReduce
    commands: NDArray[np.uint8]  # the slots, in order
    sampler: Sampler
    dtype: torch.dtype  # of hidden states


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a model."""

    whole: ModelSpec
    spec: ModelSpec  # of the rank
    weights: Weights


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank's weights, before the pool's size is known."""

    options: RankOptions
    target: Share
    draft: Share | None  # of a draft model that is split over the ranks
    group: ModelSpec | None  # whose KV is the second layer group of a block
    dtype: torch.dtype
    grown_bytes: int  # by which loading grew this process

    def with_pool(self, options: RankOptions, descriptors: list[int]) -> RankParts:
        """Map the shared memories and build the parts. `options.memory_bytes` has the sizes of the
        memories behind `descriptors`. Raises ConfigError if a kernel does not fit."""
        sizes = zip(descriptors, options.memory_bytes, strict=True)
        sums, commands, logits, blocks = [SharedMemory(*each) for each in sizes]
        reduce = SharedAllReduce(sums, options.ranks, options.rank)
        engine, vocab_size = options.engine, self.target.whole.vocab_size
        pool = KvPool(
            self.target.whole,
            options.blocks,
            engine.block_size,
            self.dtype,
            quant=engine.kv_quant,
            draft=self.group,
            memory=torch.from_numpy(blocks.array()),
        )
        backend = CpuBackend(engine.backend, engine.deterministic)
        decoder, sampler = _decoder(options, self.target, pool, reduce, backend)
        draft = None
        if self.draft is not None:
            assert pool.draft is not None
            draft_backend = CpuBackend(engine.backend)
            draft, _ = _decoder(options, self.draft, pool.draft, reduce, draft_backend)
        board = LogitsBoard(logits, vocab_size, reduce.meet)
        found = commands.array(), sampler, self.dtype
        return RankParts(decoder, draft, pool, board, reduce, *found)


def _decoder(
    options: RankOptions, share: Share, pool: KvPool, reduce: SharedAllReduce, backend: CpuBackend
) -> tuple[RankDecoder, Sampler]:
    """Return the decoder of a share, which computes in its heads of `pool`, and its sampler."""
    split = RankSplit(options.ranks, options.rank)  # attention knows no groups
    whole = share.whole
    mine = pool if whole.latent else pool.of_heads(split.kv_heads(whole.kv_heads))
    kernels, weights = backend.prepare(share.spec, share.weights, mine, reduce)
    tokens = split.share(whole.vocab_size)
    return RankDecoder(share.spec, weights, kernels, tokens, reduce), kernels.sampler


def load_rank(options: RankOptions, progress: Progress | None = None) -> LoadedRank:
    """Read the rank's share. Raises ModelError or ConfigError."""
    engine, split = options.engine, RankSplit(options.ranks, options.rank, options.ep)
    if engine.threads:
        torch.set_num_threads(engine.threads)
    whole = read_spec(options.folder, engine.max_context)
    spec = spec_of_rank(whole, split)
    dtype = loading.model_dtype(options.folder, whole, engine.dtype)
    source = draft_source(options.folder, whole, engine)
    before = resident_bytes()
    matrices = CpuBackend(engine.backend, engine.deterministic).matrices(dtype)
    quantization = engine.weight_quantization
    weights = load_weights(
        options.folder, whole, dtype, matrices, progress, quantization, split=split
    )
    draft = None if source is None else _draft_share(options, source, dtype)
    grown = max(resident_bytes() - before, 0)
    group = None if source is None else source.group
    return LoadedRank(options, Share(whole, spec, weights), draft, group, dtype, grown)


def _draft_share(options: RankOptions, source: DraftSource, dtype: torch.dtype) -> Share | None:
    """Read the rank's share of a draft model; None if the leader computes it alone."""
    whole = source.spec
    if not isinstance(whole, ModelSpec) or not divides(whole, options.ranks):
        return None
    split = RankSplit(options.ranks, options.rank)
    weights = load_weights(source.folder, whole, dtype, CpuBackend().matrices(dtype), split=split)
    return Share(whole, spec_of_rank(whole, split), weights)


def board_bytes(vocab_size: int) -> int:
    return logits_board.memory_bytes(vocab_size)
