"""A part of `benchmarks.gpu`: decode over KV in eight bits beside decode over bfloat16.

Whole steps and the attention kernel alone, of the same shape, rows and length. Accuracy is for the
parity parts to say. Holds no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from baton.engine.memory.kv_quant import FP8_E4M3, INT8
from benchmarks.figures.report import Figure
from benchmarks.gpu_parts.models import decode_seconds, random_weights, sized_runner, step_dtype
from benchmarks.gpu_parts.speed import Given, paged_seconds

POOLS = {"bf16": None, "int8": INT8, "fp8_e4m3": FP8_E4M3}


def kv_codes(given: Given) -> Iterator[Figure]:
    """Step and kernel times by the pool's dtype, each over those of bfloat16."""
    shape = given.shape("llama-8b")
    context, rows, steps = (40, 3, 2) if given.dry else (4096, 64, 16)
    weights = random_weights(shape, given.device, step_dtype(given.device))
    plain_step = plain_kernel = 0.0
    for name, quant in POOLS.items():
        kernel = paged_seconds(given, shape, rows, 1, context - 1, quant)
        wide = context + 64
        runner = sized_runner(
            shape,
            given.device,
            rows=rows,
            context=wide,
            buckets=(4 if given.dry else rows,),
            weights=weights,
            quant=quant,
        )
        times = [
            decode_seconds(runner, rows, context, wide, steps) for _ in range(1 if given.dry else 4)
        ]
        step = median(times[1:] or times)
        del runner  # the next pool takes its memory
        plain_step, plain_kernel = plain_step or step, plain_kernel or kernel
        label = f"bs{rows}_ctx{context}_{name}"
        yield Figure(f"kv_decode_ms_{label}", step * 1e3, "ms")
        yield Figure(f"kv_attention_us_{label}", kernel * 1e6, "us")
        if quant is not None:
            yield Figure(f"kv_decode_{label}_over_bf16", step / plain_step)
            yield Figure(f"kv_attention_{label}_over_bf16", kernel / plain_kernel)
