"""Loads a model folder into an engine that is ready for steps.

The module chooses the dtype and the size of the pool; `backend_choice` chooses matrices and
kernels. It keeps no state.
"""

from __future__ import annotations

from pathlib import Path

import torch

from baton.engine.checkpoint.shards import Progress
from baton.engine.checkpoint.weights import load_weights, source_dtype
from baton.engine.execution.backend_choice import CpuBackend
from baton.engine.execution.determinism_proof import prove
from baton.engine.execution.device_choice import chosen_device
from baton.engine.execution.draft_loading import draft_source
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.memory.host_memory import available_bytes, resident_bytes
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.memory_plan import MemoryOffer, PoolForm, plan_memory
from baton.engine.model.weights import Weights
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.runtime.errors import ConfigError

GIB = 1 << 30
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def build_engine(
    folder: Path, options: EngineOptions, progress: Progress | None = None
) -> TorchEngine:
    """Load the model of `folder` and start its device thread. `progress`: see `load_weights`.

    Raises ModelError and ConfigError naming the remedy.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    device = chosen_device(options.device)
    if device.type == "cuda":
        from baton.engine.execution.gpu_loading import gpu_runner

        _check_for_gpu(options)
        dtype = model_dtype(folder, read_spec(folder, options.max_context), options.dtype)
        on_gpu = gpu_runner(folder, device, dtype, options, progress)
        with torch.cuda.device(device):
            costs = on_gpu.measure_draws()
        return TorchEngine(on_gpu, threads=options.threads, device=device, draw_costs=costs)
    runner = build_runner(folder, options, progress)
    return TorchEngine(runner, threads=options.threads, draw_costs=runner.measure_draws())


def _check_for_gpu(options: EngineOptions) -> None:
    if options.draft_folder is not None:
        raise ConfigError(
            f"the {options.draft_label} in {options.draft_folder} runs on a CPU only: set "
            "worker.device to cpu, or speculate by ngram or suffix"
        )
    if options.backend != "auto":
        raise ConfigError(
            f"attention backend {options.backend!r} is for a CPU: set worker.device to cpu, or "
            "leave it"
        )


def build_runner(
    folder: Path, options: EngineOptions, progress: Progress | None = None
) -> ModelRunner:
    """Load the model of `folder` on the CPU, for a caller that runs steps in its own thread."""
    spec = read_spec(folder, options.max_context)
    dtype, kv_quant = model_dtype(folder, spec, options.dtype), options.kv_quant
    blocks, block_size = options.blocks, options.block_size
    source = draft_source(folder, spec, options)
    group = source.group if source else None
    form = PoolForm(spec, block_size, dtype, kv_quant, group)
    each = form.block_bytes
    check_room(blocks, each, available_bytes(), "before the weights are read")
    before = resident_bytes()
    backend = CpuBackend(options.backend, options.deterministic)
    quantization = options.weight_quantization
    weights = load_weights(folder, spec, dtype, backend.matrices(dtype), progress, quantization)
    draft = source.load(dtype, lambda: weights.embedding) if source else None
    grown, free = max(resident_bytes() - before, 0), available_bytes()
    check_room(blocks, each, free, "beside the weights")
    offer = MemoryOffer(grown, free, blocks, options.memory_fraction)
    plan = plan_memory(form, offer, options.max_context)
    pool = KvPool(spec, plan.blocks, block_size, dtype, quant=kv_quant, draft=group)
    runner = cpu_runner(spec, weights, pool, backend, options.max_context)
    if draft is not None:
        draft.attach(runner, CpuBackend(options.backend))
    runner.memory = plan
    return runner


def cpu_runner(
    spec: ModelSpec, weights: Weights, pool: KvPool, backend: CpuBackend, max_context: int
) -> ModelRunner:
    """Return a runner with the kernels of `backend`. A deterministic one is proven: equal
    `numerics` mean equal bits.

    Raises ConfigError for a missing backend, or if this machine's kernels are not batch-invariant.
    """
    kernels, weights = backend.prepare(spec, weights, pool)
    decoder = kernels.decoder(spec, weights)
    runner = ModelRunner(spec, pool, decoder, max_context, kernels.sampler)
    if backend.deterministic:
        runner.numerics = prove(runner)
    return runner


def check_room(blocks: int, block_bytes: int, free_bytes: int, when: str) -> None:
    """Raise ConfigError for a pool that the host can map but not hold. All but its first GiB is
    allocated when it is written, and the kernel kills a process when none is free."""
    if blocks * block_bytes > free_bytes:
        raise ConfigError(
            f"pool.blocks is {blocks}, of {block_bytes} bytes each: "
            f"{blocks * block_bytes / GIB:.2f} GiB, and {free_bytes / GIB:.2f} GiB are available "
            f"{when} (of the host, or under its container's limit); give at most "
            f"{free_bytes // block_bytes}, or 0 for a share of what is free, or free memory"
        )


def model_dtype(folder: Path, spec: ModelSpec, name: str) -> torch.dtype:
    if name == "auto":
        stored = source_dtype(folder, spec)
        return torch.float32 if stored == torch.float32 else torch.bfloat16
    if name not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ConfigError(f"worker.dtype is {name!r}: give auto or one of {known}")
    return _DTYPES[name]
