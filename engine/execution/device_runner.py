"""The runner of one GPU, with pool, attention, kernels and graphs on it.

The weights are on the GPU already. On a CPU, under Triton's interpreter, the same parts run without
captured graphs, for tests. Keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.engine.execution.backend_choice import GpuBackend
from baton.engine.execution.cuda_runner import CudaRunner
from baton.engine.execution.decode_graph import BUCKETS, DecodeGraphs, DrawKernels, Followers
from baton.engine.execution.graph_device import CudaDevice, GraphDevice, HostDevice
from baton.engine.execution.runner import ModelRunner
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.decoder import Decoder
from baton.engine.model.weights import Weights
from baton.engine.scheduling.compile_clock import watch_triton
from baton.engine.spec.model_spec import ModelSpec
from baton.engine.triton.adjust import adjust_logits, find_logprobs
from baton.engine.triton.sampling import draw_tokens

watch_triton()


def device_runner(
    spec: ModelSpec,
    weights: Weights,
    pool: KvPool,
    *,
    max_context: int = 0,
    max_rows: int = BUCKETS[-1],
    buckets: Sequence[int] = BUCKETS,
    deterministic: bool = False,
) -> CudaRunner:
    """Build a runner for `weights` and `pool` on one device. Up to `max_rows` sequences decode at
    once; graphs are captured for the `buckets` that they need (none: every step runs eagerly).
    `deterministic`: a sequence's bits depend on the sequence alone, which `prove_graphs` checks.

    Raises ConfigError for a `max_context` that the model does not reach.
    """
    context = max_context or spec.max_context
    backend = GpuBackend(pool.tensor.device, deterministic)
    kernels, weights = backend.prepare(spec, weights, pool, max_rows, context)
    decoder = kernels.decoder(spec, weights)
    eager = ModelRunner(spec, pool, decoder, max_context, kernels.sampler)
    graphs = decode_graphs(decoder, pool, spec.vocab_size, max_rows, context)
    graphs.capture(buckets)
    return CudaRunner(eager, graphs)


def decode_graphs(
    decoder: Decoder,
    pool: KvPool,
    vocab_size: int,
    max_rows: int,
    context: int,
    followers: Followers | None = None,
) -> DecodeGraphs:
    """Return graphs of `decoder`, which are not captured yet."""
    return DecodeGraphs(
        decoder,
        graph_device(pool.tensor.device),
        DrawKernels(adjust_logits, draw_tokens, find_logprobs),
        vocab_size=vocab_size,
        spare_block=pool.spare_block,
        max_rows=max_rows,
        table_width=-(-context // pool.block_size),
        followers=followers,
    )


def graph_device(device: torch.device) -> GraphDevice:
    return CudaDevice(device) if device.type == "cuda" else HostDevice()
