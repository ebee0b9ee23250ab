"""Parts of `benchmarks.gpu` that measure speed: ceilings, models, attention, a floor.

Each part takes what it may use and yields figures as they come; a part that lacks something skips
by name.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from baton.engine.execution.cuda_runner import CudaRunner
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KvQuant
from baton.engine.model.step_layout import Bounds, StepLayout, lay_out
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.engine.triton.attention_backend import TritonAttention
from baton.engine.triton.decode_buffers import DecodeLimits
from benchmarks.figures.report import Figure, at_least, at_most
from benchmarks.gpu_parts.models import (
    BLOCK_SIZE,
    GREEDY,
    SHAPES,
    TINY,
    ModelShape,
    decode_seconds,
    decode_step,
    fill_pool,
    graph_seconds,
    prompt_step,
    replay_seconds,
    seconds_of,
    sized_runner,
    spec_of,
    step_dtype,
    table,
)


class Skipped(Exception):
    """A part that cannot run here, and why."""


@dataclass(frozen=True, slots=True)
class Given:
    """`ceilings` are the figures of the part of that name, by their name."""

    device: torch.device
    dry: bool
    reference: Path | None = None
    ceilings: dict[str, float] = field(default_factory=dict)

    def shape(self, name: str) -> ModelShape:
        return (TINY if self.dry else SHAPES)[name]

    def ceiling(self, name: str) -> float:
        if name not in self.ceilings:
            raise Skipped(f"the ceiling {name} was not measured")
        return self.ceilings[name]


def ceilings(given: Given) -> Iterator[Figure]:
    """A large copy, bytes read and written; a large product of random bfloat16 matrices."""
    size = 1 << (12 if given.dry else 31)
    source = torch.empty(size, dtype=torch.uint8, device=given.device).random_(0, 256)
    target = torch.empty_like(source)
    copied = 2 * size / seconds_of(lambda: target.copy_(source), given.device) / 1e9
    yield Figure("copy_gb_per_s", copied, "GB/s")
    side = 64 if given.dry else 8192
    a, b = torch.randn(2, side, side, device=given.device).to(torch.bfloat16)
    product = 2 * side**3 / seconds_of(lambda: a @ b.T, given.device) / 1e12
    yield Figure("matrix_tflops", product, "TFLOP/s")


def llama_prefill(given: Given) -> Iterator[Figure]:
    shape = given.shape("llama-8b")
    lengths = (24, 40) if given.dry else (2048, 8192)
    runner = sized_runner(shape, given.device, rows=1, context=max(lengths) + 16, buckets=())
    for tokens in lengths:
        batch = prompt_step(shape, tokens, max(lengths) + 16)
        for _ in range(1 if given.dry else 3):
            runner.run(batch)
        times = []
        for _ in range(1 if given.dry else 7):
            begun = time.perf_counter()
            runner.run(batch)  # returns when the drawn token is on the host
            times.append(time.perf_counter() - begun)
        seconds = sorted(times)[len(times) // 2]
        yield Figure(f"llama8b_prefill_ms_{tokens}", seconds * 1e3, "ms")
        mfu = shape.prefill_flops(tokens) / seconds / 1e12 / given.ceiling("matrix_tflops")
        name = f"llama8b_prefill_mfu_{tokens}"
        yield at_least(name, mfu, 0.80) if tokens == max(lengths) else Figure(name, mfu)


def llama_decode(given: Given) -> Iterator[Figure]:
    shape = given.shape("llama-8b")
    context, rows, steps = (48, 3, 2) if given.dry else (4096, 64, 48)
    runner = sized_runner(
        shape, given.device, rows=rows, context=context + 64, buckets=(1, 4 if given.dry else 64)
    )
    for batch, target in ((1, 0.75), (rows, 0.85)):
        decode_seconds(runner, batch, context - 2, context + 64, 2)
        seconds = decode_seconds(runner, batch, context, context + 64, steps)
        rate = shape.decode_bytes(batch, context + steps // 2) / seconds / 1e9
        name = f"llama8b_decode_mbu_bs{batch}_ctx{context}"
        yield Figure(name.replace("mbu", "ms"), seconds * 1e3, "ms")
        yield at_least(name, rate / given.ceiling("copy_gb_per_s"), target)


def qwen_decode(given: Given) -> Iterator[Figure]:
    """The share of a step in which the device waits for the host: what a step takes beyond the
    bare graph, replayed without a host in between."""
    shape = given.shape("qwen3-0.6b")
    context, rows, steps = (48, 3, 2) if given.dry else (1024, 64, 40)
    bucket = 4 if given.dry else 64
    wide = context + steps + 64
    runner = sized_runner(shape, given.device, rows=rows, context=wide, buckets=(1, bucket))
    for batch, size in ((1, 1), (rows, bucket)):
        decode_seconds(runner, batch, context - 4, wide, 2)
        stepped, replayed = [], []
        for _ in range(1 if given.dry else 5):  # in turns, since clocks change
            stepped.append(decode_seconds(runner, batch, context, wide, steps))
            # The graph reads its last inputs: a step of the mean length, not of the last.
            runner.run(decode_step(batch, context + steps // 2, wide, fed=False))
            replayed.append(graph_seconds(runner, size, 1 if given.dry else 20, given.device))
        seconds, bare = median(stepped), median(replayed)
        yield Figure(f"qwen06b_decode_ms_bs{batch}", seconds * 1e3, "ms")
        yield Figure(f"qwen06b_graph_ms_bs{batch}", bare * 1e3, "ms")
        name, idle = f"qwen06b_idle_share_bs{batch}", 1 - bare / seconds
        yield at_most(name, idle, 0.02) if batch == rows else Figure(name, idle)
    seconds = _with_logprobs_seconds(runner, rows, context, wide, max(2, steps // 2))
    beside = "of one row, in the graph of its batch"
    yield Figure(f"qwen06b_logprobs_ms_bs{rows}", seconds * 1e3, "ms", beside)
    eager = sized_runner(shape, given.device, rows=1, context=wide, buckets=())
    seconds = decode_seconds(eager, 1, context, wide, max(2, steps // 2))
    yield Figure("qwen06b_eager_ms_bs1", seconds * 1e3, "ms")


def _with_logprobs_seconds(
    runner: CudaRunner, rows: int, start: int, context: int, steps: int
) -> float:
    """Wall time of a step of `rows`, the first of which asks for logprobs."""
    asked = replace(GREEDY, top_logprobs=5)
    times = []
    for step in range(steps + 1):
        first, *others = decode_step(rows, start + step, context, fed=False).slices
        first = replace(first, draws=(Draw(0, start + step + 1, asked),))
        begun = time.perf_counter()
        runner.run(StepBatch((first, *others)))
        times.append(time.perf_counter() - begun)
    return median(times[1:])


def attention(given: Given) -> Iterator[Figure]:
    """Kernels on the paged pool against torch's best on contiguous tensors, both as graphs that are
    replayed, and others' figures on the same chip."""
    cases = ((1, 1, 40), (3, 1, 40), (1, 32, 0)) if given.dry else _ATTENTION_CASES
    shape = given.shape("llama-8b")
    for rows, tokens, past in cases:
        name = f"attention_us_{rows}x{tokens}_past{past}"
        ours = paged_seconds(given, shape, rows, tokens, past)
        yield Figure(name, ours * 1e6, "us")
        best = _sdpa_seconds(given, shape, rows, tokens, past)
        yield Figure(f"{name}_over_sdpa", ours / best, "", "torch's best SDPA is 1")
        for peer, seconds in reference_seconds(given, rows, tokens, past).items():
            yield Figure(f"{name}_over_{peer}", ours / seconds, "", f"{peer} is 1")


# The reasons for which a backend refuses a shape; that it refuses is printed.
_SDPA_REASONS = (
    r"(Memory efficient|Flash attention|cuDNN attention) kernel not used because"
    r"|For dense input, both fused kernels require"
    r"|(Memory efficient|Flash|cuDNN) attention has been runtime disabled"
)
_ATTENTION_CASES = ((1, 1, 4095), (64, 1, 4095), (1, 2048, 0), (1, 8192, 0))  # rows, tokens, past


def paged_seconds(
    given: Given,
    shape: ModelShape,
    rows: int,
    tokens: int,
    past: int,
    quant: KvQuant | None = None,
) -> float:
    """Device time of one layer's attention over the paged pool."""
    context = past + tokens
    spec = spec_of(shape, context)
    dtype = step_dtype(given.device)
    blocks = rows * -(-context // BLOCK_SIZE)
    pool = KvPool(spec, blocks, BLOCK_SIZE, dtype, given.device, quant)
    fill_pool(pool)
    backend = TritonAttention(pool, spec.attention, shape.heads, DecodeLimits(rows, context))
    slices = tuple(Slice([1] * tokens, past, table(row, context)) for row in range(rows))
    bounds = Bounds(blocks, BLOCK_SIZE, shape.vocab, context)
    layout: StepLayout = lay_out(StepBatch(slices), bounds)
    queries = torch.randn(rows * tokens, shape.heads, shape.dim, device=given.device).to(dtype)

    def all_layers() -> None:  # each layer's KV is its own: no cache holds it
        for layer in range(shape.layers):
            backend.attend(layer, queries, layout)

    return replay_seconds(all_layers, given.device) / shape.layers


def _sdpa_seconds(given: Given, shape: ModelShape, rows: int, tokens: int, past: int) -> float:
    """The fastest of torch's backends that takes it, on KV without blocks."""
    dtype = torch.float32 if given.dry else torch.bfloat16
    copies = 1 if tokens > 1 else 4  # so that no cache holds the KV from one call to the next
    key = [
        torch.randn(rows, shape.kv_heads, past + tokens, shape.dim, device=given.device).to(dtype)
        for _ in range(2 * copies)
    ]
    query = torch.randn(rows, shape.heads, tokens, shape.dim, device=given.device).to(dtype)
    found: list[float] = []
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ):
        if backend == SDPBackend.MATH and found:
            continue  # slow, and its scores need much memory: only where nothing else works

        def attend(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                for copy in range(copies):
                    k, v = key[2 * copy], key[2 * copy + 1]
                    causal = tokens > 1
                    functional.scaled_dot_product_attention(
                        query, k, v, is_causal=causal, enable_gqa=True
                    )

        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", _SDPA_REASONS, UserWarning)
                found.append(replay_seconds(attend, given.device, 10) / copies)
        except RuntimeError as refusal:  # a backend that does not take these shapes
            print(f"SDPA {backend.name} refuses: {str(refusal).splitlines()[0]}")
    return min(found)


def reference_seconds(given: Given, rows: int, tokens: int, past: int) -> dict[str, float]:
    """Return seconds by engine, of the same shape in bfloat16, from the folder of parquet files."""
    if given.reference is None or given.dry:
        return {}
    if find_spec("pyarrow") is None:
        print("skipped: figures of others: pyarrow is not installed")
        return {}
    import pyarrow.parquet as parquet

    kind = "context" if tokens > 1 else "generation"
    wanted: dict[str, Any] = {
        "batch_size": rows, "isl": tokens, "num_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16",
        "window_size": 0, "step": past,
    }  # fmt: skip
    found: dict[str, float] = {}
    for path in sorted(given.reference.glob(f"*-{kind}_attention_perf.parquet")):
        filters = [(name, "==", value) for name, value in wanted.items()]
        times = parquet.read_table(path, filters=filters).column("latency").to_pylist()
        engine = path.name.split("-")[0]
        if times:
            found[engine] = min(times) / 1e3
        else:
            print(f"skipped: {engine} has no figure for {rows} x {tokens} after {past}")
    return found


def transformers_floor(given: Given) -> Iterator[Figure]:
    """`generate` of transformers on a model of the same shape."""
    if find_spec("transformers") is None:
        raise Skipped("transformers is not installed")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape, rows, tokens = given.shape("qwen3-0.6b"), 2 if given.dry else 64, 4 if given.dry else 64
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.dim,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=1,
    )
    dtype = torch.float32 if given.dry else torch.bfloat16
    with given.device:
        built: Any = Qwen3ForCausalLM(config)  # whose `to` is typed for devices alone
        model = built.to(dtype).eval()
    prompt = torch.randint(2, shape.vocab, (rows, 16 if given.dry else 1024), device=given.device)
    mask = torch.ones_like(prompt)

    def seconds(count: int) -> float:
        begun = time.perf_counter()
        made = model.generate(
            prompt,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )
        made.cpu()
        return time.perf_counter() - begun

    seconds(2)
    each = (seconds(tokens + 1) - seconds(1)) / tokens
    yield Figure(f"transformers_qwen06b_decode_ms_bs{rows}", each * 1e3, "ms", "a floor")
