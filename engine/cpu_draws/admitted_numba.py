"""Passes over the logits of one row, all or those that a grammar admits, compiled. Needs numba.

A mask is uint8, a bit for each token, lowest first, at least as long as the row; one of no bytes
admits all. The logits are never written. Called by compiled functions alone. Keeps no state.
"""

from __future__ import annotations

import numpy as np

from baton.engine.cpu.compiled import inner
from baton.engine.cpu.softmax_ir import highest
from baton.engine.cpu_draws.admitted_ir import highest_admitted, scale_admitted

BLOCK = 2048  # numbers of one pass that stay in the first cache; whole vectors and bytes of a mask
_LANES = 16


@inner
def admits(mask, token):  # type: ignore[no-untyped-def] # numba infers types
    """Whether the mask admits the token."""
    return len(mask) == 0 or (mask[token >> 3] >> np.uint8(token & 7)) & np.uint8(1) != np.uint8(0)


@inner
def best_place(x, mask):  # type: ignore[no-untyped-def] # numba infers types
    """The token of the highest logit that is admitted, the lowest of equals; 0 if none is."""
    best, at = np.float32(-np.inf), 0
    for first in range(0, len(x), BLOCK):
        found = _highest_part(x[first : first + BLOCK], mask, first)
        if found > best:
            best, at = found, first
    for token in range(at, len(x)):
        if x[token] == best and admits(mask, token):
            return token
    return 0


@inner
def _highest_part(part, mask, first):  # type: ignore[no-untyped-def] # numba infers types
    best, vectors = np.float32(-np.inf), len(part) // _LANES
    if vectors and len(mask):
        best = highest_admitted(part.ctypes.data, mask.ctypes.data + first // 8, vectors)
    elif vectors:
        best = highest(part.ctypes.data, vectors)
    for place in range(vectors * _LANES, len(part)):
        if part[place] > best and admits(mask, first + place):
            best = part[place]
    return best


@inner
def scale_part(part, mask, first, inverse, out):  # type: ignore[no-untyped-def] # numba infers types
    """Write the logits of the tokens from `first` on over the temperature, minus infinity for those
    not admitted. Minus zero becomes zero, so that equals have one key."""
    if len(mask) == 0:
        for i in range(len(part)):
            out[i] = part[i] * inverse + np.float32(0.0)
        return
    vectors = len(part) // _LANES
    if vectors:
        bits = mask.ctypes.data + first // 8
        scale_admitted(part.ctypes.data, bits, out.ctypes.data, vectors, inverse)
    for i in range(vectors * _LANES, len(part)):
        scaled = part[i] * inverse + np.float32(0.0)
        out[i] = scaled if admits(mask, first + i) else np.float32(-np.inf)
