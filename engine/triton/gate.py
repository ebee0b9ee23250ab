"""The gate of an MLP on a GPU: activation(gate) * up in one pass over their joint matrix.

The torch reference is `silu(gate) * up`, or `gelu(gate, approximate="tanh") * up`. The module
keeps no state.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]
_BLOCK = 1024


def gated(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return the gated rows [rows, ffn] of `gate_up` [rows, 2 ffn], contiguous, gate first.

    SwiGLU and GeGLU of Shazeer 2020, arXiv:2002.05202. Computed in float32, rounded once.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    if rows:
        grid = (rows, triton.cdiv(width, _BLOCK))
        _gate[grid](gate_up, out, width, GELU=activation == "gelu_tanh", BLOCK=_BLOCK)
    return out


def gated_reference(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Same as `gated`, in torch, with the dtype of `gate_up`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


@triton.jit
def _gate(gate_up_ptr, out_ptr, width, GELU: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # Triton infers types
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = gate_up_ptr + row * 2 * width
    gate = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + width + column, mask=inside, other=0.0).to(tl.float32)
    steep = gate
    if GELU:
        # (1 + tanh(z)) / 2 is the logistic function of 2 z; 1.59577 is 2 * sqrt(2 / pi).
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    value = gate * tl.sigmoid(steep) * up
    tl.store(out_ptr + row * width + column, value.to(out_ptr.dtype.element_ty), mask=inside)
