"""Loads a model folder into a runner on one GPU, and does the arithmetic of that GPU's memory.

    free after loading  =  buffers, graphs, a step's numbers  +  the KV pool  +  what is left
                           └──────── measured, with ─────────┘  └ memory_fraction of the rest
                                     a pool of one step

The pool is sized last, from what the rest really took: the runner is built once over a small
pool, runs its largest step, and is built again over the pool that then fits. What it took is
measured in this process: other workers of the GPU take memory at the same time. Keeps no state.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from baton.engine.checkpoint.shards import Progress
from baton.engine.checkpoint.weights import load_weights
from baton.engine.execution.backend_choice import GpuBackend
from baton.engine.execution.cuda_runner import CudaRunner
from baton.engine.execution.determinism_proof import prove_graphs
from baton.engine.execution.divided_step import is_out_of_memory
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.memory.kv_pool import KvPool, block_bytes
from baton.engine.memory.memory_plan import MemoryOffer, PoolForm, plan_memory
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.runtime.errors import ConfigError, OutOfMemory
from baton.runtime.sampling import SamplingParams

# Of the device's memory, beside what torch's allocator took: graphs (up to 64 KiB for each of
# their kernels) and loaded kernels. It shows only in what is free, where others' memory does too.
MAX_UNTRACKED_BYTES = 1 << 30

MakePool = Callable[[int], KvPool]
Build = Callable[[KvPool], CudaRunner]


class DeviceMemory(Protocol):
    """The memory of a device, in bytes."""

    def free(self) -> int:
        """Wait for the device's work, then return its free memory."""
        ...

    def held(self) -> int:
        """Return the memory that torch's allocator in this process has reserved."""
        ...

    def release(self) -> None:
        """Return unused memory of the allocator to the device."""
        ...


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0])

    def held(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def release(self) -> None:
        gc.collect()  # a graph's memory is free when the graph is gone, and not before
        torch.cuda.empty_cache()


def gpu_runner(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    options: EngineOptions,
    progress: Progress | None,
) -> CudaRunner:
    """Load the model of `folder` onto `device`. Raises ModelError and ConfigError."""
    try:
        from baton.engine.execution.device_runner import device_runner

        matrices = GpuBackend(device, options.deterministic).matrices()
    except ImportError as error:
        raise ConfigError(
            f"the kernels of {device} cannot be loaded ({error}): install triton "
            "(requirements/cuda.txt), or set worker.device to cpu"
        ) from error
    spec = read_spec(folder, options.max_context)
    block_bytes(spec, options.block_size, dtype, options.kv_quant)  # raises before weights are read
    with _memory_errors_as_config_errors(device), torch.cuda.device(device):
        memory = CudaMemory(device)
        before, quantization = memory.held(), options.weight_quantization
        weights = load_weights(folder, spec, dtype, matrices, progress, quantization)
        memory.release()
        weights_bytes = memory.held() - before

        def make_pool(blocks: int) -> KvPool:
            return KvPool(spec, blocks, options.block_size, dtype, device, options.kv_quant)

        build = partial(
            device_runner,
            spec,
            weights,
            max_context=options.max_context,
            max_rows=options.max_rows,
            deterministic=options.deterministic,
        )
        form = PoolForm(spec, options.block_size, dtype, options.kv_quant)
        return sized_runner(form, options, make_pool, build, memory, weights_bytes)


@contextmanager
def _memory_errors_as_config_errors(device: torch.device) -> Iterator[None]:
    """Translate an out-of-memory error while loading or later into a ConfigError."""
    try:
        yield
    except Exception as error:
        # Each device raises a class of its own when memory runs out; any other error is raised
        # again.
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the model does not fit into the memory of {device} ({reason}): set worker.device to "
            "cpu or worker.quantization to int8 or int4, use a smaller model, or end what else "
            "holds that memory (nvidia-smi)"
        ) from error


def sized_runner(
    form: PoolForm,
    options: EngineOptions,
    make_pool: MakePool,
    build: Build,
    memory: DeviceMemory,
    weights_bytes: int,
) -> CudaRunner:
    """Build a runner over the largest pool, of blocks of `form`, that `options` allow. Raises
    ConfigError if the device has no memory for it or `deterministic` does not hold on it."""
    spec = form.spec
    beside, free = 0, memory.free()
    try:
        if not options.blocks:
            beside = memory_beside_pool(spec, options, make_pool, build, memory)
            free = memory.free()  # loaded kernels stay
        offer = MemoryOffer(weights_bytes, free, options.blocks, options.memory_fraction, beside)
        plan = plan_memory(form, offer, options.max_context)
        runner = build(make_pool(plan.blocks))
        if options.blocks:  # else it has run; compile before serving
            _run_largest_step(runner, spec, options)
        if options.deterministic:
            runner.eager.numerics = prove_graphs(runner)
    except Exception as error:
        # Each device raises a class of its own when memory runs out; any other error is raised
        # again.
        if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
            raise
        raise ConfigError(
            f"the GPU has {free} bytes free after loading: not enough for the KV pool, decode "
            "buffers, graphs and a step; lower pool.blocks, pool.memory_fraction, "
            "worker.max_context, step.max_sequences or step.prefill_tokens"
        ) from error
    runner.memory = plan
    return runner


def memory_beside_pool(
    spec: ModelSpec, options: EngineOptions, make_pool: MakePool, build: Build, memory: DeviceMemory
) -> int:
    """Measure the bytes that a runner takes beside its pool: decode buffers, graphs, and the
    activations of a step of `step_tokens`, which this runs. Of memory that other processes take or
    free during the measurement at most MAX_UNTRACKED_BYTES are counted."""
    memory.release()
    free, held = memory.free(), memory.held()
    pool = make_pool(-(-_step_tokens(spec, options) // options.block_size))
    runner = build(pool)
    _run_largest_step(runner, spec, options)
    own = memory.held() - held
    unseen = free - memory.free() - own
    taken = own - pool.memory.nbytes + min(max(unseen, 0), MAX_UNTRACKED_BYTES)
    del runner, pool
    memory.release()
    return max(taken, 0)


def _step_tokens(spec: ModelSpec, options: EngineOptions) -> int:
    return min(options.step_tokens, options.max_context or spec.max_context)


def _run_largest_step(runner: CudaRunner, spec: ModelSpec, options: EngineOptions) -> None:
    """Run one prompt as long as a step and the pool allow, with a draw, in blocks that no sequence
    uses yet. Raises OutOfMemory if it does not fit."""
    size = options.block_size
    tokens = min(_step_tokens(spec, options), runner.pool.blocks * size)
    prompt = [(7919 * at + 13) % spec.vocab_size for at in range(tokens)]
    draw = Draw(0, tokens, SamplingParams(temperature=0.0))
    step = StepBatch((Slice(prompt, 0, range(-(-tokens // size)), (draw,)),))
    for error in runner.run(step).failed.values():
        raise error
