"""The log-probabilities of a prompt's tokens, as a worker has computed them.

The first token has none: nothing stands before it. Immutable; knows no transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.proto import worker_pb2


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The scores of the tokens from the second on, in order; `top_tokens` and `top_logprobs` hold
    the `width` best tokens for each, best first, joined."""

    logprobs: Sequence[float]
    ranks: Sequence[int]
    top_tokens: Sequence[int]
    top_logprobs: Sequence[float]
    width: int

    def top(self, position: int, most: int) -> tuple[tuple[int, float], ...]:
        """Return the `most` best tokens at this index of the prompt, which is at least 1."""
        first = (position - 1) * self.width
        end = first + min(most, self.width)
        return tuple(zip(self.top_tokens[first:end], self.top_logprobs[first:end], strict=True))


def scores_of(
    message: worker_pb2.PromptLogprobs, prompt_tokens: int, vocab_size: int
) -> PromptScores | None:
    """Return the scores, or None if they cannot be those of such a prompt."""
    count, best = prompt_tokens - 1, len(message.top_tokens)
    whole = count and best % count == 0
    counts = len(message.logprobs), len(message.ranks), len(message.top_logprobs)
    if counts != (count, count, best) or (best and not whole):
        return None
    if max(message.top_tokens, default=0) >= vocab_size:
        return None
    return PromptScores(
        tuple(message.logprobs),
        tuple(message.ranks),
        tuple(message.top_tokens),
        tuple(message.top_logprobs),
        best // count if count else 0,
    )
