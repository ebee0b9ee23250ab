"""A request's logit bias as arrays, made once for each request instead of for each draw.

The cache key is the identity of the request's tuple, which the cache keeps alive with its arrays.
The least recently used entries are dropped. Knows no draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_CACHED_BIASES = 256  # of up to 1,024 tokens: about 30 MB

Bias = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class BiasArrays:
    tokens: NDArray[np.int64]  # distinct, sorted
    amounts: NDArray[np.float32]

    def known(self, vocab_size: int) -> bool:
        """Return whether the model has all of these tokens."""
        lowest, highest = int(self.tokens.min(initial=0)), int(self.tokens.max(initial=0))
        return lowest >= 0 and highest < vocab_size


def bias_arrays(bias: Bias) -> BiasArrays:
    return _arrays(_BiasKey(bias))


class _BiasKey:
    """A key equal only for the same tuple object: hashing and comparing a thousand pairs takes
    longer than adding them to the logits."""

    __slots__ = ("bias",)

    def __init__(self, bias: Bias) -> None:
        self.bias = bias

    def __hash__(self) -> int:
        return id(self.bias)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BiasKey) and self.bias is other.bias


@lru_cache(maxsize=_CACHED_BIASES)
def _arrays(key: _BiasKey) -> BiasArrays:
    tokens, amounts = zip(*key.bias, strict=True) if key.bias else ((), ())
    distinct, inverse = np.unique(np.array(tokens, dtype=np.int64), return_inverse=True)
    total = np.zeros(len(distinct), dtype=np.float32)
    np.add.at(total, inverse, np.array(amounts, dtype=np.float32))
    return BiasArrays(distinct, total)
