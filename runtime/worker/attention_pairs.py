"""The work of attention in a prompt, which grows with the square of its tokens. Pure."""

from __future__ import annotations


def causal_pairs(start: int, end: int) -> int:
    """Return the query-key pairs of the tokens [start, end): each sees itself and all before."""
    return (end * (end + 1) - start * (start + 1)) // 2
