"""Applies grammars' masks to logits on the host, after penalties and biases.

    logits    0.3   2.1  -1.0   0.7
    bits        1     0     1     0        one bit a token, lowest first
    masked    0.3  -inf  -1.0  -inf

So tokens that a grammar does not admit have no chance, and no part in logprobs. Only masked rows
cost anything. The masks are awaited here, after the forward pass beside which they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.scheduling.batch import Draw

# Bias of a barred token in a masked row: a token that the grammar admits is drawn all the same if
# it is the only one.
LEAST_BIAS = np.float32(-1e30)


def mask_logits(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> None:
    """Set the logits of tokens that are not admitted to minus infinity."""
    for row, bits in masks_of(draws, rows):
        mask_row(logits[row].numpy(), bits)


def masks_of(draws: Sequence[Draw | None], rows: Sequence[int]) -> list[tuple[int, bytes]]:
    """Wait for the masks of these rows; those that admit all are left out."""
    found = []
    for row in rows:
        draw = draws[row]
        allowed = None if draw is None else draw.allowed
        bits = None if allowed is None else allowed.bitmask()
        if bits is not None:
            found.append((row, bits))
    return found


def mask_row(row: NDArray[np.float32], bits: bytes) -> None:  # row [vocab]
    admitted = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[: len(row)]
    row[: len(admitted)][admitted == 0] = -np.inf
    row[len(admitted) :] = -np.inf
