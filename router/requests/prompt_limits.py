"""The limits of prompts: the context of the workers, and how much of its prompts one answer may
hold.

Knows validated requests alone. Stateless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime.errors import InvalidRequest

MAX_SCORES = 1 << 15  # log-probabilities of prompts in one answer
MAX_ALTERNATIVES = 1 << 21  # log-probabilities of outputs in an answer in one piece: 200 MB
MAX_REPEATED_TOKENS = 1 << 18  # of prompts, in all choices of one answer


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """The limits of the workers, in tokens: the fleet knows them, requests are checked against
    them. `max_context` is the context of the largest worker now, and `common_context` what each of
    them has (0: as much)."""

    max_context: int
    vocab_size: int
    common_context: int = 0


def check_scored(requests: Sequence[ValidatedRequest]) -> None:
    """Raise InvalidRequest if the log-probabilities of all their prompts are too many numbers for
    one answer, or are to be streamed, which would hold them back until the end."""
    numbers = sum(
        (len(request.prompt) - 1) * (1 + request.sampling.prompt_logprobs) * request.choices
        for request in requests
        if request.scored
    )
    field = "prompt_logprobs" if requests[0].prompt_top is not None else "echo"
    if numbers > MAX_SCORES:
        raise InvalidRequest(
            f"{field}: the prompts' tokens with all alternatives are {numbers} numbers, and an "
            f"answer holds {MAX_SCORES}: shorten or divide the prompts, or ask for fewer "
            "alternatives",
            field,
        )
    if requests[0].stream and any(request.scored for request in requests):
        raise InvalidRequest(
            f"{field}: log-probabilities of a prompt are not streamed: leave out stream", field
        )


def check_alternatives(requests: Sequence[ValidatedRequest]) -> None:
    """Raise InvalidRequest if an answer in one piece could hold too many log-probabilities. One
    choice is always allowed: the context bounds it."""
    choices = sum(request.choices for request in requests)
    first = requests[0]
    if first.stream or not first.logprobs or choices == 1:
        return
    numbers = sum(
        request.max_tokens * request.choices * (1 + request.sampling.top_logprobs)
        for request in requests
    )
    if numbers > MAX_ALTERNATIVES:
        raise InvalidRequest(
            f"logprobs: {choices} choices of up to {first.max_tokens} tokens with alternatives may "
            f"be {numbers} numbers, and an answer in one piece holds {MAX_ALTERNATIVES}: lower "
            "max_tokens, n or the alternatives, or stream",
            "logprobs",
        )


def check_repeated(requests: Sequence[ValidatedRequest]) -> None:
    """Raise InvalidRequest if their choices repeat more of the prompts than one answer holds."""
    first = requests[0]
    repeated = sum(len(request.prompt) * request.choices for request in requests)
    if repeated > MAX_REPEATED_TOKENS and (first.echo is not None or first.token_ids):
        field = "return_token_ids" if first.echo is None else "echo"
        raise InvalidRequest(
            f"{field}: the choices would repeat {repeated} tokens of prompts, and an answer holds "
            f"{MAX_REPEATED_TOKENS}: lower n or divide the prompts",
            field,
        )
