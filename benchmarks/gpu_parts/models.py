"""Random models of known shapes, made where they run, and steps over them.

No files are read. `tiny` shapes run the same code on a CPU in seconds. Holds no state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from baton.engine.execution.cuda_runner import CudaRunner
from baton.engine.execution.device_runner import device_runner
from baton.engine.execution.graph_device import CudaDevice
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KvQuant
from baton.engine.model.linear import PlainMatrix
from baton.engine.model.weights import LayerWeights, MlpWeights, Weights
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.engine.spec.model_spec import AttentionSpec, ModelSpec
from baton.engine.spec.rope_spec import RopeSpec
from baton.runtime.sampling import SamplingParams

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class ModelShape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    vocab: int
    qk_norm: bool
    tied: bool

    @property
    def matrix_parameters(self) -> int:
        """Those that a layer multiplies with, of all layers."""
        qkv = self.hidden * (self.heads + 2 * self.kv_heads) * self.dim
        out = self.heads * self.dim * self.hidden
        return self.layers * (qkv + out + 3 * self.hidden * self.ffn)

    @property
    def kv_bytes(self) -> int:
        """The KV bytes of one token in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.dim

    def prefill_flops(self, tokens: int) -> float:
        """The operations of a prompt from its first token: matrices, and half of the attention's
        square."""
        attention = 2 * self.layers * self.heads * self.dim * tokens * tokens
        return 2.0 * self.matrix_parameters * tokens + attention

    def decode_bytes(self, rows: int, context: int) -> float:
        """That a step must read: every matrix, the head's too, and the KV of its rows."""
        weights = 2 * (self.matrix_parameters + self.hidden * self.vocab)
        return float(weights + rows * context * self.kv_bytes)


SHAPES = {
    "llama-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128_256, False, False),
    "qwen3-0.6b": ModelShape(28, 1024, 16, 8, 128, 3072, 151_936, True, True),
}
TINY = {
    "llama-8b": ModelShape(2, 64, 4, 2, 32, 96, 211, False, False),
    "qwen3-0.6b": ModelShape(2, 64, 4, 2, 32, 96, 199, True, True),
}


def spec_of(shape: ModelShape, context: int) -> ModelSpec:
    return ModelSpec(
        family="qwen3" if shape.qk_norm else "llama",
        layers=shape.layers,
        hidden_size=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.dim,
        ffn_size=shape.ffn,
        vocab_size=shape.vocab,
        norm_eps=1e-6,
        max_context=context,
        rotary_dim=shape.dim,
        rope=RopeSpec("default", 500_000.0),
        attention=AttentionSpec(shape.dim**-0.5, (0,) * shape.layers),
        tied_embeddings=shape.tied,
        eos_ids=(),
        qk_norm=shape.qk_norm,
    )


def random_weights(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Weights:
    def matrix(rows: int, columns: int) -> Tensor:
        made = torch.empty((rows, columns), dtype=dtype, device=device)
        return made.normal_(0.0, columns**-0.5)

    def norm(size: int) -> Tensor:
        return torch.rand(size, dtype=dtype, device=device) + 0.5

    layers = tuple(
        LayerWeights(
            input_norm=norm(shape.hidden),
            qkv=PlainMatrix(matrix((shape.heads + 2 * shape.kv_heads) * shape.dim, shape.hidden)),
            q_norm=norm(shape.dim) if shape.qk_norm else None,
            k_norm=norm(shape.dim) if shape.qk_norm else None,
            output=PlainMatrix(matrix(shape.hidden, shape.heads * shape.dim)),
            attention_norm=None,
            mlp_norm=norm(shape.hidden),
            mlp=MlpWeights(
                gate_up=PlainMatrix(matrix(2 * shape.ffn, shape.hidden)),
                down=PlainMatrix(matrix(shape.hidden, shape.ffn)),
            ),
            output_norm=None,
        )
        for _ in range(shape.layers)
    )
    embedding = matrix(shape.vocab, shape.hidden)
    head = embedding if shape.tied else matrix(shape.vocab, shape.hidden)
    return Weights(embedding, layers, norm(shape.hidden), PlainMatrix(head))


def step_dtype(device: torch.device) -> torch.dtype:
    """The interpreter cannot multiply bfloat16; there the same code runs in float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def fill_pool(pool: KvPool) -> None:
    """Write random numbers of a deviation of 0.5, or random codes of smaller ones, all finite."""
    if pool.quant is None or pool.scales is None:
        for block in torch.split(pool.tensor, 1024):
            block.normal_(0.0, 0.5)
        return
    for block in torch.split(pool.tensor.view(torch.uint8), 1024):
        block.random_(0, 256)
        block.bitwise_and_(0xF7)  # not E4M3's NaN
    pool.scales.fill_(0.5 / pool.quant.largest)


def sized_runner(
    shape: ModelShape,
    device: torch.device,
    *,
    rows: int,
    context: int,
    buckets: tuple[int, ...],
    deterministic: bool = False,
    weights: Weights | None = None,
    quant: KvQuant | None = None,
) -> CudaRunner:
    """A runner whose pool, full of random numbers or codes, holds `rows` sequences of `context`.
    `weights` None: random ones."""
    dtype = step_dtype(device)
    spec = spec_of(shape, context)
    weights = weights or random_weights(shape, device, dtype)
    pool = KvPool(spec, rows * -(-context // BLOCK_SIZE), BLOCK_SIZE, dtype, device, quant)
    fill_pool(pool)
    return device_runner(
        spec,
        weights,
        pool,
        max_rows=max(buckets, default=1),
        buckets=buckets,
        deterministic=deterministic,
    )


def table(row: int, context: int) -> range:
    """Blocks of sequence `row`."""
    each = -(-context // BLOCK_SIZE)
    return range(row * each, (row + 1) * each)


def prompt_step(shape: ModelShape, tokens: int, context: int) -> StepBatch:
    """A whole prompt in one chunk, and its first token drawn."""
    chosen = torch.randint(0, shape.vocab, (tokens,)).tolist()
    return StepBatch((Slice(chosen, 0, table(0, context), (Draw(0, tokens, GREEDY),)),))


def decode_step(rows: int, start: int, context: int, fed: bool) -> StepBatch:
    """One token of each of `rows` sequences, at position `start`."""
    return StepBatch(
        tuple(
            Slice(
                (0 if fed else 17 + row,),
                start,
                table(row, context),
                (Draw(0, start + 1, GREEDY),),
                feed=row if fed else None,
            )
            for row in range(rows)
        )
    )


def decode_seconds(runner: CudaRunner, rows: int, start: int, context: int, steps: int) -> float:
    """Wall time of a step where each is started before the one before it is over."""
    before = runner.start(decode_step(rows, start, context, fed=False))
    before.result()
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        after = runner.start(decode_step(rows, start + step, context, fed=True))
        before.result()
        before = after
    before.result()
    return (time.perf_counter() - begun) / steps


def graph_seconds(runner: CudaRunner, bucket: int, count: int, device: torch.device) -> float:
    """The time of one replay among `count` in a row on the inputs of the last step, so that the
    device never waits for a launch."""

    def replay() -> None:
        for _ in range(count):
            runner.graphs.replay(bucket)

    return seconds_of(replay, device, 5) / count


def seconds_of(work: Callable[[], object], device: torch.device, repeat: int = 20) -> float:
    """Median device time of `work`, after three runs that do not count."""
    for _ in range(3 if device.type == "cuda" else 1):
        work()
    times: list[float] = []
    for _ in range(repeat if device.type == "cuda" else 1):
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
        else:
            begun = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun)
    return median(times)


def replay_seconds(work: Callable[[], None], device: torch.device, repeat: int = 20) -> float:
    """Median device time of `work` as a graph that is replayed, so that no launch is waited for.
    Raises RuntimeError where `work` cannot be captured."""
    replay = CudaDevice(device).capture(work) if device.type == "cuda" else work
    return seconds_of(replay, device, repeat)
