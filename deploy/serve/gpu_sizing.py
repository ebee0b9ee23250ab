"""Sizes a fleet for a model, a kind of GPU and a load: memory by the engine's own plan, times by a
measured timing model or a roofline, workers by planner/sizing.py.

Estimated is what only a GPU can tell: what the process holds beside torch (CONTEXT_BYTES), what a
step needs beside the pool, and without a measured model the shares of the vendor's figures that a
step attains. Keeps no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.engine.checkpoint.shard_files import INDEX_FILE, SINGLE_FILE
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import model_dtype
from baton.engine.memory.memory_plan import MemoryOffer, MemoryPlan, PoolForm, plan_memory
from baton.engine.spec.config_fields import read_fields
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.engine.spec.rank_split import RankSplit, check_split, possible_ranks, spec_of_rank
from baton.engine.spec.weight_sizes import WeightSizes, weight_sizes
from baton.planner.gpu_table import Gpu
from baton.planner.sizing import (
    DecodeLimits,
    DecodeSize,
    Load,
    PrefillSize,
    size_decode,
    size_prefill,
)
from baton.planner.timing_model import ChunkTiming, Roofline, StepTiming, TimingModel
from baton.runtime.config import Config
from baton.runtime.errors import ConfigError

CONTEXT_BYTES = 640 << 20  # of the driver and loaded kernels
GRAPH_BYTES = 1 << 30  # of decode graphs and their buffers
HOST_STEP_S = 0.002  # what the host does for a step, on a CPU of these days
# Of whole servers by public points (ai-dynamo/aiconfigurator: Llama 3.1 70B in FP8 under vLLM on
# H200, prompts of 8,192 tokens, four at a time): 0.43 and 0.61 on one GPU, 0.24 and 0.27 on eight.
FLOPS_SHARE, BANDWIDTH_SHARE = 0.4, 0.55
DOUBLING_SHARE = 0.8  # for each doubling of the ranks
MAX_NODE_RANKS = 8
MIN_SEQUENCES = 4  # of the load's length in a pool, when the ranks are chosen here
IDLE_PREFILL = 0.4  # busy for less: the objective is dear
KV_TOLERANCE = 0.1  # between a timing model and the model that is sized


@dataclass(frozen=True, slots=True)
class SizingRequest:
    """`tp` 0: the fewest ranks that hold the model. `timing`: of a worker with `tp` ranks."""

    folder: Path
    gpu: Gpu
    load: Load
    config: Config
    tp: int = 0
    timing: TimingModel | None = None

    @property
    def tokens(self) -> int:
        """Return the length of a request at its end."""
        return self.load.prompt_tokens + self.load.output_tokens


@dataclass(frozen=True, slots=True)
class Sizing:
    """A sized fleet. `weights`: of the whole model; `memory`: of one rank."""

    dtype: str
    tp: int
    weights: WeightSizes
    memory: MemoryPlan
    sequences: int  # of the load's length, in a worker's pool
    timing: str
    prefill: PrefillSize
    decode: DecodeSize
    notes: tuple[str, ...]

    @property
    def gpus(self) -> int:
        return self.tp * (self.prefill.workers + self.decode.workers)

    @property
    def unmet(self) -> bool:
        """Return whether no number of workers meets the objectives."""
        return self.prefill.unmet or self.decode.unmet


def size_fleet(request: SizingRequest) -> Sizing:
    """Return the size. Raises ModelError for a model that is not served, and ConfigError for a
    context that it lacks, and if it does not fit."""
    spec = read_spec(request.folder, request.config.worker.max_context)
    longest = request.config.worker.max_context or spec.max_context
    if request.tokens > longest:
        raise ConfigError(
            f"--context is {request.tokens}: the model serves {longest} tokens "
            "(worker.max_context, or its config.json); give less"
        )
    worker = request.config.worker
    options = EngineOptions(quantization=worker.quantization, kv_dtype=request.config.pool.kv_dtype)
    dtype = _dtype(request.folder, spec, worker.dtype)
    if options.weight_quantization != "none" and spec.quantization is not None:
        raise ConfigError(
            f"--quantization is {worker.quantization}, but the model's weights are quantised "
            f"already ({spec.quantization.layout}): leave it out"
        )
    tp, plan = _ranks(request, spec, dtype, options)
    whole = weight_sizes(spec, dtype.itemsize, options.weight_quantization)
    sequences = plan.sequences_of(request.tokens)
    limits = DecodeLimits(request.config.step.max_sequences, sequences)
    if request.timing is None:
        timing = roofline(request.gpu, whole, tp, plan, min(limits.batch, limits.pool))
    else:
        timing = request.timing
        _check_timing(timing, plan.block_bytes / plan.block_size * _split(spec, tp))
    prefill = size_prefill(request.load, timing, request.config.step.chunk_tokens)
    return Sizing(
        dtype=str(dtype).removeprefix("torch."),
        tp=tp,
        weights=whole,
        memory=plan,
        sequences=sequences,
        timing=timing.name,
        prefill=prefill,
        decode=size_decode(request.load, timing, limits, prefill),
        notes=tuple(_notes(request, spec, tp, prefill)),
    )


def rank_plan(
    request: SizingRequest, spec: ModelSpec, dtype: torch.dtype, options: EngineOptions, tp: int
) -> MemoryPlan:
    """Return the memory plan of one of `tp` ranks, each on a GPU of its own. Raises ConfigError if
    the weights or a pool of any use do not fit, or the model cannot be split so."""
    own = spec_of_rank(spec, RankSplit(tp, 0, request.config.worker.ep))
    config, size = request.config, request.config.pool.block_size
    weights = weight_sizes(own, dtype.itemsize, options.weight_quantization).bytes
    free = request.gpu.memory_bytes - CONTEXT_BYTES - weights
    offer = MemoryOffer(
        weights_bytes=weights,
        free_bytes=max(0, free),
        blocks=config.pool.blocks,
        fraction=config.pool.memory_fraction,
        beside_bytes=beside_pool(own, dtype, config),
    )
    plan = plan_memory(
        PoolForm(own, size, dtype, options.kv_quant), offer, config.worker.max_context
    )
    if plan.pool_bytes + offer.beside_bytes > free:
        raise ConfigError(
            f"pool.blocks is {plan.blocks}: {plan.line()}, which is more than {request.gpu.name} "
            "has; give fewer"
        )
    return plan


def beside_pool(spec: ModelSpec, dtype: torch.dtype, config: Config) -> int:
    """Estimate the bytes of a rank's graphs, of the logits of a full decode batch, and of the
    activations of its largest step."""
    inner = 3 * spec.ffn_size
    if spec.experts is not None:
        experts = spec.experts
        inner = max(inner, 3 * (experts.chosen * experts.ffn_size + experts.shared_ffn_size))
    row = (6 * spec.hidden_size + inner) * dtype.itemsize
    logits = 3 * config.step.max_sequences * spec.vocab_size * 4
    return GRAPH_BYTES + config.step.prefill_tokens * row + logits


def roofline(
    gpu: Gpu, whole: WeightSizes, tp: int, plan: MemoryPlan, sequences: int
) -> TimingModel:
    """Return the timing model of a worker of `tp` GPUs that attains the usual shares of the
    vendor's figures. `whole`: weights of the unsplit model; `plan`: of one rank; `sequences`: of
    the largest batch, which decides how many experts a step reads."""
    share = DOUBLING_SHARE ** math.log2(tp)
    flops, bandwidth = share * FLOPS_SHARE, share * BANDWIDTH_SHARE
    return TimingModel(
        name=f"roofline of {gpu.name} at {flops:.0%} of its arithmetic, {bandwidth:.0%} of its "
        "bandwidth",
        kv_bytes_per_token=plan.block_bytes / plan.block_size,
        chunk=ChunkTiming(fixed_s=HOST_STEP_S),
        step=StepTiming(fixed_s=HOST_STEP_S),
        roofline=Roofline(
            parameters=whole.active_parameters / tp,
            pair_flops=whole.pair_flops / tp,
            weight_bytes=whole.read_bytes(sequences) / tp,
            flops_per_s=gpu.flops_per_s * flops,
            memory_bytes_per_s=gpu.memory_bytes_per_s * bandwidth,
        ),
    )


def _ranks(
    request: SizingRequest, spec: ModelSpec, dtype: torch.dtype, options: EngineOptions
) -> tuple[int, MemoryPlan]:
    """Return the given number of ranks, or the least that holds MIN_SEQUENCES of the load, and the
    plan of one. Raises ConfigError if a node's ranks do not."""
    if request.tp:
        check_split(spec, request.tp, request.config.worker.ep)
        plan = rank_plan(request, spec, dtype, options, request.tp)
        if not plan.sequences_of(request.tokens):
            raise ConfigError(f"no sequence of {request.tokens} tokens fits: {plan.line()}")
        return request.tp, plan
    reason = "the model cannot be split"
    for tp in (each for each in possible_ranks(spec) if each in (1, 2, 4, MAX_NODE_RANKS)):
        try:
            plan = rank_plan(request, spec, dtype, options, tp)
        except ConfigError as error:
            reason = str(error)
            continue
        if plan.sequences_of(request.tokens) >= MIN_SEQUENCES:
            return tp, plan
        reason = plan.line()
    raise ConfigError(
        f"no number of ranks up to {MAX_NODE_RANKS} of {request.gpu.name} holds {MIN_SEQUENCES} "
        f"sequences of {request.tokens} tokens ({reason}): give a larger GPU, --quantization int8 "
        "or int4, --kv-dtype int8, or a shorter --context"
    )


def _split(spec: ModelSpec, tp: int) -> float:
    """Return how many times a rank's KV of a token the whole model's is."""
    if spec.latent is not None:
        return 1.0  # alike on every rank
    return spec.kv_heads / len(RankSplit(tp, 0).kv_heads(spec.kv_heads))


def _check_timing(timing: TimingModel, kv_bytes: float) -> None:
    if abs(timing.kv_bytes_per_token / kv_bytes - 1) > KV_TOLERANCE:
        raise ConfigError(
            f"the timing model {timing.name!r} has {timing.kv_bytes_per_token:g} bytes of KV a "
            f"token, this model with this --kv-dtype {kv_bytes:g}: give the timing of this model"
        )


def _dtype(folder: Path, spec: ModelSpec, name: str) -> torch.dtype:
    """Return the worker's dtype; without the files of weights, the one that config.json names."""
    if name != "auto" or any((folder / file).exists() for file in (SINGLE_FILE, INDEX_FILE)):
        return model_dtype(folder, spec, name)
    fields = read_fields(folder / "config.json")
    stored = fields.get("dtype") or fields.get("torch_dtype")
    return torch.float32 if stored == "float32" else torch.bfloat16


def _notes(request: SizingRequest, spec: ModelSpec, tp: int, prefill: PrefillSize) -> list[str]:
    """Return what the operator has to know to judge the figures."""
    notes = []
    dear = request.load.ttft_s < math.inf and prefill.busy < IDLE_PREFILL
    if dear and prefill.workers > 1:
        notes.append(
            f"prefill workers idle for {1 - prefill.busy:.0%} of the time, to meet ttft. A longer "
            "objective, a faster GPU or shorter prompts need far fewer"
        )
    if request.timing is None:
        notes.append(
            "times are estimates: they are fitted to no step of Baton. Give --timing FILE "
            "(baton calibrate) where there are measurements"
        )
        if spec.experts is not None:
            notes.append("each decode step is taken to read the experts of the largest batch")
    if any(spec.attention.windows):
        notes.append("layers with a window are counted as if they attended to all tokens")
    if tp > 1:
        notes.append(
            f"a worker of {tp} GPUs has never run on GPUs, only its processes on CPUs: see "
            "docs/progress.md. A larger GPU, --quantization or --kv-dtype may need only one"
        )
    return notes
