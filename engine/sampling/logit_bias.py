"""A request's logit bias as arrays: made once for each request, not for each of its draws.

Found by the identity of the request's own tuple, which is kept as long as its arrays are. The
least recently used are forgotten. Knows no draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_KEPT = 256  # of up to 1,024 tokens: some 30 MB

Bias = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class BiasArrays:
    tokens: NDArray[np.int64]  # each once, in order
    amounts: NDArray[np.float32]

    def known(self, vocab_size: int) -> bool:
        """Whether the model has all of these tokens."""
        lowest, highest = int(self.tokens.min(initial=0)), int(self.tokens.max(initial=0))
        return lowest >= 0 and highest < vocab_size


def bias_arrays(bias: Bias) -> BiasArrays:
    return _arrays(_Same(bias))


class _Same:
    """Equal where it is the same tuple: comparing and hashing a thousand pairs takes longer than
    adding them to the logits."""

    __slots__ = ("bias",)

    def __init__(self, bias: Bias) -> None:
        self.bias = bias

    def __hash__(self) -> int:
        return id(self.bias)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.bias is other.bias


@lru_cache(maxsize=_KEPT)
def _arrays(same: _Same) -> BiasArrays:
    tokens, amounts = zip(*same.bias, strict=True) if same.bias else ((), ())
    distinct, places = np.unique(np.array(tokens, dtype=np.int64), return_inverse=True)
    total = np.zeros(len(distinct), dtype=np.float32)
    np.add.at(total, places, np.array(amounts, dtype=np.float32))
    return BiasArrays(distinct, total)
