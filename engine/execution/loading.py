"""From a model folder to an engine that is ready for steps.

The one place that chooses number kinds, the attention backend and the size of the pool.
Keeps no state.
"""

from __future__ import annotations

from pathlib import Path

import torch

from baton.engine.checkpoint.shards import Progress
from baton.engine.checkpoint.weights import load_weights, source_dtype
from baton.engine.cpu.matrices import CpuMatrices
from baton.engine.execution.cpu_parts import cpu_parts
from baton.engine.execution.device_choice import chosen_device
from baton.engine.execution.draft_loading import draft_spec_for, load_draft
from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.memory.host_memory import available_bytes, resident_bytes
from baton.engine.memory.kv_pool import KvPool, block_bytes, blocks_for
from baton.engine.memory.kv_quant import CODES, KvCodes
from baton.engine.memory.memory_plan import MemoryPlan
from baton.engine.model.weights import Weights
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.engine.spec.quantization_config import MADE, Made
from baton.runtime.errors import ConfigError

GIB = 1 << 30
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def build_engine(
    folder: Path,
    *,
    blocks: int = 0,
    block_size: int = 16,
    dtype: str = "auto",
    threads: int = 0,
    max_context: int = 0,
    memory_fraction: float = 0.5,
    backend: str = "auto",
    deterministic: bool = False,
    quantization: str = "none",
    kv_dtype: str = "auto",
    progress: Progress | None = None,
    device: str = "cpu",
    max_rows: int = 256,
    step_tokens: int = 512,
    draft_folder: Path | None = None,
) -> TorchEngine:
    """Load the model of `folder` and start its device thread.

    `blocks` 0: as many as fit into `memory_fraction` of the memory that is free after loading; more
    than fit are refused. `dtype` "auto": float32 where the weights are stored so, else bfloat16
    (float16 computes on few CPUs at the same speed, and decodes without the compiled kernel).
    `threads` 0: torch's own choice. `max_context` in tokens, 0: the model's own. `deterministic`:
    see `deterministic_runner`, or on a GPU `device_runner`. `quantization`: what plain weights
    become, "int8" or "int4". `kv_dtype`: what the pool holds, "int8" or "fp8_e4m3", or what the
    model computes in. `progress`: see `load_weights`. `device`: see `chosen_device`; on a GPU
    decode steps of up to `max_rows` are captured, and memory is kept for a step of `step_tokens`.
    `draft_folder`: of the model that proposes for slices that ask for it.
    Raises ModelError and ConfigError naming the remedy.
    """
    if threads:
        torch.set_num_threads(threads)
    if (chosen := chosen_device(device)).type == "cuda":
        from baton.engine.execution.gpu_loading import GpuOptions, gpu_runner

        _check_for_gpu(backend, draft_folder)
        kind = _dtype(folder, read_spec(folder, max_context), dtype)
        sizes = blocks, block_size, max_context, memory_fraction, max_rows, step_tokens
        options = GpuOptions(*sizes, _codes(kv_dtype), deterministic)
        on_gpu = gpu_runner(folder, chosen, kind, options, _made(quantization), progress)
        with torch.cuda.device(chosen):
            costs = on_gpu.measure_draws()
        return TorchEngine(on_gpu, threads=threads, device=chosen, draw_costs=costs)
    runner = build_runner(
        folder,
        blocks=blocks,
        block_size=block_size,
        dtype=dtype,
        max_context=max_context,
        memory_fraction=memory_fraction,
        backend=backend,
        deterministic=deterministic,
        quantization=quantization,
        kv_dtype=kv_dtype,
        progress=progress,
        draft_folder=draft_folder,
    )
    return TorchEngine(runner, threads=threads, draw_costs=runner.measure_draws())


def _check_for_gpu(backend: str, draft_folder: Path | None) -> None:
    if draft_folder is not None:
        raise ConfigError(
            f"the draft model in {draft_folder} runs on a CPU only: set worker.device to cpu, or "
            "speculate by ngram or suffix"
        )
    if backend != "auto":
        raise ConfigError(
            f"attention backend {backend!r} is for a CPU: set worker.device to cpu, or leave it"
        )


def build_runner(
    folder: Path,
    *,
    blocks: int = 0,
    block_size: int = 16,
    dtype: str = "auto",
    max_context: int = 0,
    memory_fraction: float = 0.5,
    backend: str = "auto",
    deterministic: bool = False,
    quantization: str = "none",
    kv_dtype: str = "auto",
    progress: Progress | None = None,
    draft_folder: Path | None = None,
) -> ModelRunner:
    """As `build_engine`, for whoever runs steps in a thread of their own."""
    spec = read_spec(folder, max_context)
    kind, codes = _dtype(folder, spec, dtype), _codes(kv_dtype)
    draft_spec = draft_spec_for(folder, spec, draft_folder, max_context)
    each = block_bytes(spec, block_size, kind, codes)
    each += block_bytes(draft_spec, block_size, kind) if draft_spec else 0
    _check_room(blocks, each, available_bytes(), "before the weights are read")
    before = resident_bytes()
    matrices = CpuMatrices(batch_invariant=deterministic)
    weights = load_weights(folder, spec, kind, matrices, progress, _made(quantization))
    draft = load_draft(draft_folder, draft_spec, kind) if draft_folder and draft_spec else None
    grown, free = max(resident_bytes() - before, 0), available_bytes()
    _check_room(blocks, each, free, "beside the weights")
    fraction = 0.0 if blocks else memory_fraction
    budget = int(memory_fraction * free)
    blocks = blocks or blocks_for(spec, block_size, kind, budget, codes, draft_spec)
    pool = KvPool(spec, blocks, block_size, kind, codes=codes, draft=draft_spec)
    if deterministic:
        runner = _deterministic(spec, weights, pool, max_context)
    else:
        parts = cpu_parts(spec, weights, pool, backend)
        runner = ModelRunner(
            spec,
            weights,
            pool,
            parts.attention,
            max_context,
            parts.gating,
            parts.norms,
            parts.fused_pass,
            parts.sampler,
        )
    if draft is not None:
        runner.draft = draft.model(pool, runner.max_context, backend)
    sizes = blocks, pool.block_bytes, block_size, runner.max_context
    runner.memory = MemoryPlan(grown, free, fraction, *sizes, pool.kind)
    return runner


def _check_room(blocks: int, block_bytes: int, free_bytes: int, when: str) -> None:
    """Raise ConfigError for a pool that the host would give, and then not have when it is
    written: memory is taken page by page, and a process that finds none is killed."""
    if blocks * block_bytes > free_bytes:
        raise ConfigError(
            f"pool.blocks is {blocks}, of {block_bytes} bytes each: "
            f"{blocks * block_bytes / GIB:.2f} GiB, and {free_bytes / GIB:.2f} GiB are available "
            f"{when} (of the host, or under its container's limit); give at most "
            f"{free_bytes // block_bytes}, or 0 for a share of what is free, or free memory"
        )


def _made(name: str) -> Made:
    if name not in MADE:
        raise ConfigError(f"worker.quantization is {name!r}: give {', '.join(MADE)}")
    return MADE[MADE.index(name)]


def _codes(name: str) -> KvCodes | None:
    if name != "auto" and name not in CODES:
        raise ConfigError(f"pool.kv_dtype is {name!r}: give auto or one of {', '.join(CODES)}")
    return CODES.get(name)


def _dtype(folder: Path, spec: ModelSpec, name: str) -> torch.dtype:
    if name == "auto":
        stored = source_dtype(folder, spec)
        return torch.float32 if stored == torch.float32 else torch.bfloat16
    if name not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ConfigError(f"worker.dtype is {name!r}: give auto or one of {known}")
    return _DTYPES[name]


def _deterministic(
    spec: ModelSpec, weights: Weights, pool: KvPool, max_context: int
) -> ModelRunner:
    try:
        from baton.engine.execution.deterministic_runner import deterministic_runner
    except ImportError as error:
        raise ConfigError(
            f"worker.deterministic needs numba: {error}; install numba, or serve without it"
        ) from error
    return deterministic_runner(spec, weights, pool, max_context)
