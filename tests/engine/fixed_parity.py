"""The products of the deterministic mode: right, and each row the same bits whatever is beside it.

As in `attention_parity.py`, a check returns its error and the largest that is allowed; for bits
that is how many differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from parity import Check, error, noticed
from torch import Tensor

from baton.engine.model.quantized_weight import QuantizedWeight, quantize_int4, quantize_int8
from baton.engine.triton.experts import expert_matmul, expert_matmul_reference, sort_by_expert
from baton.engine.triton.linear import FixedTileLinear, fixed_products
from baton.engine.triton.quantized import TritonQuantized
from baton.engine.triton.quantized_experts import quantized_expert_matmul, stacked_codes

CHECKS: dict[str, Check] = {}
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
ROWS = 70  # more than a tile
PARTS = ((0, 1), (3, 5), (30, 67), (69, 70))  # of them, computed without the others


def bits(product: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Numbers of [rows, out] that depend on which rows are computed together."""
    whole = product(x)
    return float(sum(int((product(x[a:b]) != whole[a:b]).sum()) for a, b in PARTS))


def linear_check(dtype: torch.dtype, width: int, depth: int, *, apart: bool) -> Check:
    """`FixedTileLinear` against float64; `apart`: its bits."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        shape = (width, depth) if tiny else (width * 64, depth * 40)
        weight = (torch.randn(shape, device=device) / shape[1] ** 0.5).to(dtype)
        bias = torch.randn(shape[0], device=device).to(dtype)
        x = torch.randn(ROWS, shape[1] + 5, device=device).to(dtype)[:, : shape[1]]
        linear = FixedTileLinear(weight, bias)
        if apart:
            return bits(linear, x), 0.0
        return error(linear(x), x.double() @ weight.double().T + bias.double()), ALLOWED[dtype]

    return run


def heads_check(device: torch.device, tiny: bool) -> tuple[float, float]:
    """A product for each head, whose operands lie between others', and its bits."""
    heads, inner, rank = (3, 12, 40) if tiny else (128, 128, 512)
    dtype = torch.float32 if tiny else torch.bfloat16
    up = (torch.randn(heads, inner + 7, rank, device=device) / inner**0.5).to(dtype)
    x = torch.randn(ROWS, heads, inner + 4, device=device).to(dtype)[..., :inner]

    def absorbed(rows: Tensor) -> Tensor:
        return fixed_products(rows.transpose(0, 1), up[:, :inner]).transpose(0, 1)

    back = fixed_products(absorbed(x).transpose(0, 1), up[:, :inner].transpose(1, 2))
    wanted = torch.bmm(x.transpose(0, 1).double(), up[:, :inner].double())
    worst = error(absorbed(x), wanted.transpose(0, 1))
    turned = torch.bmm(absorbed(x).transpose(0, 1).double(), up[:, :inner].double().transpose(1, 2))
    worst = max(worst, error(back.transpose(0, 1), turned.transpose(0, 1)))
    return worst + bits(absorbed, x), ALLOWED[dtype]


def quantized_check(weight: Callable[[Tensor], QuantizedWeight], fixed: bool = True) -> Check:
    """A quantised matrix against its plain numbers, and its bits."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        packed = weight(torch.randn((40, 128) if tiny else (4096, 4096)))
        x = torch.randn(ROWS, packed.columns, device=device)
        ordinary = TritonQuantized(packed, torch.ones(packed.rows), device)
        linear = ordinary.batch_invariant() if fixed else ordinary
        truth = x.double().cpu() @ packed.dequantized(torch.float64).T + 1
        return error(linear(x), truth) + bits(linear, x), ALLOWED[x.dtype]

    return run


def experts_check(device: torch.device, tiny: bool) -> tuple[float, float]:
    """Rows by their experts, some of which have none, alone and beside others."""
    experts, width, depth = (5, 40, 72) if tiny else (64, 1536, 2048)
    dtype = torch.float32 if tiny else torch.bfloat16
    weights = (torch.randn(experts, width, depth, device=device) / depth**0.5).to(dtype)
    rows, choices = (9, 2) if tiny else (500, 8)
    chosen = torch.rand(rows, experts - 1, device=device).topk(choices, dim=-1).indices
    x = torch.randn(rows, depth, device=device).to(dtype)

    def mixed(first: int, end: int) -> Tensor:  # [rows, choices, width]
        order, offsets = sort_by_expert(chosen[first:end], experts)
        given = (x[first:end], weights, offsets, order // choices)
        if (first, end) == (0, rows):
            wanted.append(expert_matmul_reference(x.double(), weights.double(), *given[2:]))
        out = expert_matmul(*given, tile_rows=64)
        found.append(out)
        placed = torch.empty_like(out)
        placed[order] = out
        return placed.view(end - first, choices, width)

    found: list[Tensor] = []
    wanted: list[Tensor] = []
    whole = mixed(0, rows)
    worst = error(found[0], wanted[0])
    wrong = sum(int((mixed(row, row + 1)[0] != whole[row]).sum()) for row in (0, rows // 2))
    return worst + wrong, ALLOWED[dtype]


def coded_experts_check(
    weight: Callable[[Tensor], QuantizedWeight], tile_rows: int, per_expert: int
) -> Check:
    """Quantised experts, some without rows, against the same as plain numbers."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        experts, width, depth = (5, 40, 96) if tiny else (64, 1536, 2048)
        dtype = torch.float32 if tiny else torch.bfloat16
        # To quantise 64 of them on the host takes longer than the check; five, in turns, are
        # never those of an expert that lies a power of two away.
        several = [weight(torch.randn(width, depth) / depth**0.5) for _ in range(5)]
        turns = [each % len(several) for each in range(experts)]
        stack = stacked_codes((several[each] for each in turns), experts, device)
        plain = torch.stack([each.dequantized(torch.float64) for each in several])
        plain = plain.to(device)[turns]
        rows = per_expert * experts
        chosen = torch.randint(0, experts - 2, (rows, 2), device=device)
        order, offsets = sort_by_expert(chosen, experts)
        x = torch.randn(rows, depth, device=device).to(dtype)
        out = quantized_expert_matmul(x, stack, offsets, order // 2, tile_rows)
        wanted = expert_matmul_reference(x.double(), plain, offsets, order // 2)
        worst = error(out, wanted)
        alone = _offsets_of(chosen[0, :1], experts)
        once = quantized_expert_matmul(x[:1], stack, alone, None, tile_rows)
        at = order.tolist().index(0)
        wrong = int((once[0] != out[at]).sum()) if tile_rows else 0
        return worst + wrong, ALLOWED[dtype]

    return run


def _offsets_of(chosen: Tensor, experts: int) -> Tensor:
    return sort_by_expert(chosen[None], experts)[1]


def _fp8(weight: Tensor) -> QuantizedWeight:
    codes = weight.to(torch.float8_e4m3fn)
    return QuantizedWeight("fp8", codes, torch.rand(len(codes), 1) + 0.5, codes.shape[1])


for _dtype in (torch.float32, torch.bfloat16):
    _kind = str(_dtype).removeprefix("torch.")
    CHECKS[f"linear, {_kind}"] = linear_check(_dtype, 40, 72, apart=False)
    CHECKS[f"linear, {_kind}, bits"] = linear_check(_dtype, 40, 72, apart=True)
CHECKS["linear, float16, whole tiles, bits"] = linear_check(torch.float16, 64, 128, apart=True)
CHECKS["products of heads"] = heads_check
CHECKS["quantized int8"] = quantized_check(quantize_int8)
CHECKS["quantized int4 by groups of 32"] = quantized_check(lambda w: quantize_int4(w, 32))
CHECKS["quantized int4 by groups of 16"] = quantized_check(lambda w: quantize_int4(w, 16))
CHECKS["quantized fp8"] = quantized_check(_fp8)
CHECKS["quantized, the ordinary product is noticed"] = noticed(
    quantized_check(quantize_int8, False)
)
CHECKS["experts"] = experts_check
CHECKS["experts, int8, few rows"] = coded_experts_check(quantize_int8, 0, 1)
CHECKS["experts, int4 by groups of 32, many rows"] = coded_experts_check(
    lambda w: quantize_int4(w, 32), 0, 20
)
CHECKS["experts, fp8"] = coded_experts_check(_fp8, 0, 3)
CHECKS["experts, int8, fixed"] = coded_experts_check(quantize_int8, 64, 3)
