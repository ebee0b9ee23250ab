"""Applies grammars' masks to logits on a GPU, after penalties and biases.

One program masks one block of one row. A masked token gets a logit far below that of a token which
a bias bars, but the sum of a row stays finite, so that a row with non-finite numbers is still
detected. Rows without a mask are not read. The module keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

MASKED_LOGIT = -1e32
_BLOCK = 4096
_WORD_BITS = 32


def mask_device_logits(logits: Tensor, found: Sequence[tuple[int, bytes]]) -> None:
    """Mask rows of `logits` float32 [draws, vocab], contiguous, in place; `found` has each row
    with its bits."""
    if not found:
        return
    vocab = logits.shape[1]
    masks = np.zeros((len(found), -(-vocab // _WORD_BITS)), np.int32)
    for place, (_, bits) in enumerate(found):
        words = np.frombuffer(bits, np.int32)[: masks.shape[1]]
        masks[place, : len(words)] = words
    device = logits.device
    _mask[(len(found), triton.cdiv(vocab, _BLOCK))](
        logits,
        torch.tensor([row for row, _ in found], device=device),
        torch.from_numpy(masks).to(device),
        vocab,
        masks.shape[1],
        MASKED_LOGIT,
        BLOCK=_BLOCK,
    )


@triton.jit
def _mask(  # type: ignore[no-untyped-def]
    logits_ptr, rows_ptr, masks_ptr, vocab, words, masked, BLOCK: tl.constexpr
):
    place = tl.program_id(0)
    row = tl.load(rows_ptr + place)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = token < vocab
    word = tl.load(masks_ptr + place * words + token // 32, mask=held, other=0)
    barred = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + row * vocab + token, masked, mask=held & barred)
