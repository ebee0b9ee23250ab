"""The masks of a step's draws as a device reads them: 32 tokens a word, a row for each mask.

    rows    -1   0  -1   1        draws 1 and 3 have a mask
    words    w00 w01 w02 ..       mask 0, lowest token first; zeros beyond the end of a shorter mask
             w10 w11 w12 ..       mask 1

Only masked draws have words, so that a step transfers no more than its masks. Keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.sampling.grammar_masks import masks_of
from baton.engine.scheduling.batch import Draw

WORD_BITS = 32
# A masked token's logit on a device: far below a forbidden one's, while a row's sum stays finite.
MASKED_LOGIT = -1e32


@dataclass(frozen=True, slots=True)
class MaskWords:
    """Tensors on one device. All words have the same count of columns."""

    rows: Tensor  # int32 [draws]: the draw's row in `words`; -1: it has no mask
    words: Tensor  # int32 [masks, words of the vocabulary]

    @staticmethod
    def of(
        draws: Sequence[Draw | None], vocab: int, buffers: tuple[Tensor, Tensor] | None = None
    ) -> MaskWords:
        """Wait for the masks of `draws`, and build their words on the CPU; None has no mask.
        `buffers`: memory for rows and words, at least as many as draws."""
        found = masks_of(draws, [row for row, draw in enumerate(draws) if _has_mask(draw)])
        rows, words = buffers or (
            torch.empty(len(draws), dtype=torch.int32),
            torch.empty((len(found), words_of(vocab)), dtype=torch.int32),
        )
        rows, words = rows[: len(draws)], words[: len(found)]
        row_array, word_bytes = rows.numpy(), words.numpy().view(np.uint8)
        row_array[:] = -1
        for index, (row, bits) in enumerate(found):
            row_array[row] = index
            count = min(len(bits), word_bytes.shape[1])
            word_bytes[index, :count] = np.frombuffer(bits, np.uint8, count)
            word_bytes[index, count:] = 0
        return MaskWords(rows, words)

    def to(self, device: torch.device) -> MaskWords:
        return MaskWords(self.rows.to(device), self.words.to(device))


def words_of(vocab: int) -> int:
    """Return how many words a mask of `vocab` tokens has."""
    return -(-vocab // WORD_BITS)


def _has_mask(draw: Draw | None) -> bool:
    return draw is not None and draw.allowed is not None
