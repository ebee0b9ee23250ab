"""From a model folder to a runner on one GPU, and the arithmetic of that GPU's memory.

    free after loading  =  buffers, graphs, a step's numbers  +  the KV pool  +  what is left
                           └──────── measured, with ─────────┘  └ memory_fraction of the rest
                                     a pool of one step

The pool is sized last, from what the rest really took: the runner is built once over a small
pool, runs its largest step, and is built again over the pool that then fits. What it took is
this process's own: other workers of the GPU take memory meanwhile. Keeps no state.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from baton.engine.checkpoint.shards import Progress
from baton.engine.checkpoint.weights import load_weights
from baton.engine.execution.cuda_runner import CudaRunner
from baton.engine.execution.determinism_proof import prove_graphs
from baton.engine.execution.divided_step import is_out_of_memory
from baton.engine.memory.kv_pool import KvPool, block_bytes, blocks_for
from baton.engine.memory.kv_quant import KvCodes
from baton.engine.memory.memory_plan import MemoryPlan
from baton.engine.scheduling.batch import Draw, SamplingParams, Slice, StepBatch
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.engine.spec.quantization_config import Made
from baton.runtime.errors import ConfigError, OutOfMemory

# Of the device's memory, beside what torch's allocator took: graphs (up to 64 KiB for each of
# their kernels) and loaded kernels. It shows only in what is free, where others' memory does too.
MAX_UNTRACKED_BYTES = 1 << 30

MakePool = Callable[[int], KvPool]
Build = Callable[[KvPool], CudaRunner]


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """As in `build_engine`; 0 blocks are as many as fit."""

    blocks: int
    block_size: int
    max_context: int
    memory_fraction: float
    max_rows: int
    step_tokens: int
    codes: KvCodes | None = None  # what the pool holds, None: plain numbers
    deterministic: bool = False


class Memory(Protocol):
    """A device's memory, in bytes."""

    def free(self) -> int:
        """Of the device, whoever holds the rest, once its work is done."""
        ...

    def held(self) -> int:
        """By this process, in torch's allocator: tensors, graphs' tensors, and what they left."""
        ...

    def release(self) -> None:
        """Give back what no tensor uses any more."""
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
    options: GpuOptions,
    made: Made,
    progress: Progress | None,
) -> CudaRunner:
    """Everything of the model on `device`. Raises ModelError and ConfigError."""
    try:
        from baton.engine.execution.device_runner import device_runner
        from baton.engine.triton.matrices import TritonMatrices
    except ImportError as error:
        raise ConfigError(
            f"the kernels of {device} cannot be loaded ({error}): install triton "
            "(requirements/cuda.txt), or set worker.device to cpu"
        ) from error
    spec = read_spec(folder, options.max_context)
    block_bytes(spec, options.block_size, dtype, options.codes)  # raises before weights are read
    with _room_for_weights(device), torch.cuda.device(device):
        memory = CudaMemory(device)
        before = memory.held()
        weights = load_weights(folder, spec, dtype, TritonMatrices(device), progress, made)
        memory.release()
        weights_bytes = memory.held() - before

        def make_pool(blocks: int) -> KvPool:
            return KvPool(spec, blocks, options.block_size, dtype, device, options.codes)

        build = partial(
            device_runner,
            spec,
            weights,
            max_context=options.max_context,
            max_rows=options.max_rows,
            deterministic=options.deterministic,
        )
        return sized_runner(spec, dtype, options, make_pool, build, memory, weights_bytes)


@contextmanager
def _room_for_weights(device: torch.device) -> Iterator[None]:
    """Also for what does not find room later, unless it says so itself."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the model does not fit into the memory of {device} ({reason}): set worker.device to "
            "cpu or worker.quantization to int8 or int4, use a smaller model, or end what else "
            "holds that memory (nvidia-smi)"
        ) from error


def sized_runner(
    spec: ModelSpec,
    dtype: torch.dtype,
    options: GpuOptions,
    make_pool: MakePool,
    build: Build,
    memory: Memory,
    weights_bytes: int,
) -> CudaRunner:
    """A runner over the largest pool that `options` allow. Raises ConfigError where the device
    has no memory for it, or is not `deterministic`."""
    size, blocks, fraction, beside = options.block_size, options.blocks, 0.0, 0
    free = memory.free()
    try:
        if not blocks:
            fraction = options.memory_fraction
            beside = memory_beside_pool(spec, options, make_pool, build, memory)
            free = memory.free()  # kernels that were loaded meanwhile stay
            budget = int(fraction * (free - beside))
            blocks = blocks_for(spec, size, dtype, budget, options.codes)
        runner = build(make_pool(blocks))
        if options.blocks:  # else it has run: no client waits for what it compiles
            _run_largest_step(runner, spec, options)
        if options.deterministic:
            runner.eager.numerics = prove_graphs(runner)
    except Exception as error:
        if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
            raise
        raise ConfigError(
            f"the GPU has {free} bytes free after loading: not enough for the KV pool, decode "
            "buffers, graphs and a step; lower pool.blocks, pool.memory_fraction, "
            "worker.max_context, step.max_sequences or step.prefill_tokens"
        ) from error
    pool = runner.pool
    sizes = blocks, pool.block_bytes, size, runner.max_context
    runner.memory = MemoryPlan(weights_bytes, free, fraction, *sizes, pool.kind, beside)
    return runner


def memory_beside_pool(
    spec: ModelSpec, options: GpuOptions, make_pool: MakePool, build: Build, memory: Memory
) -> int:
    """Bytes that a runner takes beside its pool: decode buffers, graphs, and the numbers of a
    step of `step_tokens`, which this runs. Of what another process takes or gives back meanwhile
    at most MAX_UNTRACKED_BYTES are counted."""
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


def _step_tokens(spec: ModelSpec, options: GpuOptions) -> int:
    return min(options.step_tokens, options.max_context or spec.max_context)


def _run_largest_step(runner: CudaRunner, spec: ModelSpec, options: GpuOptions) -> None:
    """One prompt as long as a step and the pool allow, and its first draw: into blocks that
    nobody owns yet. Raises OutOfMemory where it does not fit."""
    size = options.block_size
    tokens = min(_step_tokens(spec, options), runner.pool.blocks * size)
    prompt = [(7919 * place + 13) % spec.vocab_size for place in range(tokens)]
    draw = Draw(0, tokens, SamplingParams(temperature=0.0))
    step = StepBatch((Slice(prompt, 0, range(-(-tokens // size)), (draw,)),))
    for lack in runner.run(step).failed.values():
        raise lack
