"""The limits of the workers, in tokens: the fleet knows them, requests are checked against them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """`max_context` is the context of the largest worker now, and `common_context` what each of
    them has (0: as much)."""

    max_context: int
    vocab_size: int
    common_context: int = 0
