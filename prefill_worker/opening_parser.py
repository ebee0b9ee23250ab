"""The parser of a reader's OpenHandoff: checks it and builds a Prompt of this worker."""

from __future__ import annotations

from collections.abc import Callable

from baton.prefill_worker.prompts import Prompt
from baton.proto import handoff_pb2
from baton.runtime import identity
from baton.runtime.errors import InvalidRequest
from baton.runtime.telemetry import tracing
from baton.runtime.wire import MAX_CHOICES, ModelLimits, check_tokens, sampling_params


def parse_opening(
    opening: handoff_pb2.OpenHandoff,
    limits: ModelLimits,
    block_size: int,
    on_end: Callable[[Prompt], None],
    *,
    wall_s: float,
) -> Prompt:
    """Build a Prompt. Raises InvalidRequest, which names the field."""
    tokens = list(opening.tokens)
    if not 1 <= len(tokens) <= limits.max_context:
        raise InvalidRequest(
            f"{len(tokens)} tokens, not from 1 to {limits.max_context}", field="tokens"
        )
    check_tokens(tokens, "tokens", limits.vocab_size)
    if not 1 <= opening.prompt_tokens <= len(tokens):
        raise InvalidRequest("prompt_tokens is not within the tokens", field="prompt_tokens")
    if opening.held_blocks > (len(tokens) - 1) // block_size:
        raise InvalidRequest("held_blocks leaves nothing to compute", field="held_blocks")
    choices = list(opening.choices)
    if not 1 <= len(choices) <= MAX_CHOICES or len(set(choices)) != len(choices):
        raise InvalidRequest("choices are missing, repeated or too many", field="choices")
    return Prompt(
        request_id=opening.request_id,
        tokens=tokens,
        prompt_tokens=opening.prompt_tokens,
        held_blocks=opening.held_blocks,
        params=sampling_params(opening.sampling, limits.vocab_size),
        choices=choices,
        identities=identity.chain(limits.key, limits.root(opening.cache_salt), tokens, block_size),
        tenant=identity.tenant_of(opening.cache_salt),
        trace=tracing.extract(opening.trace_context),
        arrived_wall_s=wall_s,
        on_end=on_end,
        source=opening.source if opening.HasField("source") else None,
        cache_salt=opening.cache_salt,
        attempt=opening.attempt,
        deadline_ms=opening.deadline_ms,
    )
