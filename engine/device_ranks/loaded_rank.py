"""Loads one rank's share of a model onto its device, on the leader and on other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.engine.checkpoint.shards import Progress
from baton.engine.checkpoint.weights import load_weights
from baton.engine.device_ranks.collectives import Collectives
from baton.engine.device_ranks.device_rank_decoder import DeviceRankDecoder
from baton.engine.execution import loading
from baton.engine.execution.backend_choice import GpuBackend
from baton.engine.execution.decoder_kernels import DecoderKernels
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.weights import Weights
from baton.engine.ranks.rank_options import RankOptions
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.engine.spec.rank_split import RankSplit, spec_of_rank


@dataclass(frozen=True, slots=True)
class LoadedDeviceRank:
    """A rank's weights on its device, before the pool's size is known."""

    options: RankOptions
    whole: ModelSpec
    spec: ModelSpec  # of the rank
    weights: Weights
    dtype: torch.dtype
    device: torch.device

    @property
    def context(self) -> int:
        """Return the most tokens of a sequence."""
        return self.options.engine.max_context or self.whole.max_context

    def pool(self, blocks: int, memory: torch.Tensor) -> KvPool:
        """Return a pool of the rank's KV heads over `memory`, uint8 [bytes] on the device."""
        engine = self.options.engine
        return KvPool(
            self.spec,
            blocks,
            engine.block_size,
            self.dtype,
            self.device,
            engine.kv_quant,
            memory=memory,
        )

    def decoder(
        self, pool: KvPool, collectives: Collectives
    ) -> tuple[DeviceRankDecoder, DecoderKernels]:
        """Return the decoder over `pool`, and its kernels."""
        engine = self.options.engine
        backend = GpuBackend(self.device, engine.deterministic)
        kernels, weights = backend.prepare(
            self.spec, self.weights, pool, engine.max_rows, self.context
        )
        collectives.in_order = engine.deterministic
        vocab_size = self.whole.vocab_size
        decoder = DeviceRankDecoder(self.spec, weights, kernels, vocab_size, collectives)
        return decoder, kernels


def load_device_rank(options: RankOptions, progress: Progress | None = None) -> LoadedDeviceRank:
    """Read the rank's share. Raises ModelError or ConfigError."""
    engine, split = options.engine, RankSplit(options.ranks, options.rank, options.ep)
    whole = read_spec(options.folder, engine.max_context)
    spec = spec_of_rank(whole, split)
    dtype = loading.model_dtype(options.folder, whole, engine.dtype)
    device = device_of(options)
    matrices = GpuBackend(device, engine.deterministic).matrices()
    quantization = engine.weight_quantization
    weights = load_weights(
        options.folder, whole, dtype, matrices, progress, quantization, split=split
    )
    return LoadedDeviceRank(options, whole, spec, weights, dtype, device)


def device_of(options: RankOptions, rank: int | None = None) -> torch.device:
    """Return the device of a rank, by default the options' own: GPUs follow each other from that
    of the leader on, which `engine.device` names."""
    first = torch.device(options.engine.device)
    rank = options.rank if rank is None else rank
    return first if first.type == "cpu" else torch.device("cuda", (first.index or 0) + rank)
