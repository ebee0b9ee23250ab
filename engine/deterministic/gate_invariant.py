"""The gate of a gated MLP, row by row in strict arithmetic.

Both activations are x * sigmoid(f(x)), with f(x) = x for SiLU (Elfwing et al. 2017,
arXiv:1702.03118) and f(x) = sqrt(8 / pi) * (x + 0.044715 x^3) for the tanh form of GELU
(Hendrycks and Gimpel 2016, arXiv:1606.08415). torch's own kernels use one exponential for
whole vectors and another for what is left at the end of a thread's share, so that a value
depends on how many rows there are. Needs numba; keeps no state.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.engine.cpu.compiled import take_threads
from baton.engine.cpu.strict_kernels import gate_rows
from baton.engine.spec.families import Activation

_SLOPES = {"silu": (1.0, 0.0), "gelu_tanh": (1.5957691216057308, 0.07135481627159119)}


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up, [rows, ffn], of `gate_up` [rows, 2 ffn]: computed in float32, rounded
    once to the kind of `gate_up`."""
    wide = gate_up.to(torch.float32).contiguous()
    out = torch.empty(wide.shape[0], wide.shape[1] // 2)
    linear, cubic = _SLOPES[activation]
    take_threads()
    gate_rows(wide.numpy(), np.float32(linear), np.float32(cubic), out.numpy())
    return out.to(gate_up.dtype)
