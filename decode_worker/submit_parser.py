"""The parser of a router's Submit: checks it and builds a Request of this worker."""

from __future__ import annotations

from collections.abc import Callable

from baton.decode_worker.sequences import Request, RequestUpdate, Sequence
from baton.proto import worker_pb2
from baton.runtime.errors import InvalidRequest
from baton.runtime.telemetry import tracing
from baton.runtime.wire import MAX_CHOICES, ModelLimits, check_tokens, sampling_params

MAX_CANDIDATES = 64


def parse_submit(
    submit: worker_pb2.Submit,
    limits: ModelLimits,
    emit: Callable[[RequestUpdate], None],
    *,
    now_s: float,
    wall_s: float,
) -> Request:
    """Build a Request. Raises InvalidRequest, which names the field."""
    prompt = list(submit.prompt)
    check_tokens(prompt, "prompt", limits.vocab_size)
    if not prompt:
        raise InvalidRequest("the prompt is empty", field="prompt")
    if not 1 <= submit.max_tokens <= limits.max_context:
        raise InvalidRequest(
            f"max_tokens is {submit.max_tokens}, not from 1 to {limits.max_context}",
            field="max_tokens",
        )
    if len(prompt) + submit.max_tokens > limits.max_context:
        raise InvalidRequest(
            f"{len(prompt)} prompt tokens and {submit.max_tokens} of output are over the "
            f"context of {limits.max_context}",
            field="max_tokens",
        )
    if len(submit.placement.candidates) > MAX_CANDIDATES:
        raise InvalidRequest("too many candidates", field="placement")
    candidates = list(submit.placement.candidates)
    request = Request(
        request_id=submit.request_id,
        attempt=submit.attempt,
        prompt=prompt,
        sampling=sampling_params(submit.sampling, limits.vocab_size),
        wire_sampling=submit.sampling,
        max_tokens=submit.max_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        local=submit.placement.local,
        candidates=candidates,
        source=submit.placement.source if submit.placement.HasField("source") else None,
        cache_salt=submit.cache_salt,
        root=limits.root(submit.cache_salt),
        alone=submit.alone,
        trace=tracing.extract(submit.trace_context),
        arrived_s=now_s,
        arrived_wall_s=wall_s,
        emit=emit,
        reported_prefill=candidates[0].boot_id if candidates else b"",
    )
    request.sequences = _sequences(submit, request, limits.vocab_size)
    return request


def _sequences(submit: worker_pb2.Submit, request: Request, vocab_size: int) -> list[Sequence]:
    choices = list(submit.choices)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"{len(choices)} choices, not from 1 to {MAX_CHOICES}", field="n")
    if len({choice.choice for choice in choices}) != len(choices):
        raise InvalidRequest("a choice is named twice", field="n")
    if len(choices) > 1 and any(choice.accepted for choice in choices):
        raise InvalidRequest("several choices, and accepted tokens", field="choices")
    for choice in choices:
        check_tokens(choice.accepted, "accepted", vocab_size)
        if len(choice.accepted) >= request.max_tokens:
            raise InvalidRequest("a choice has all its tokens already", field="choices")
    return [Sequence(request, choice.choice, list(choice.accepted)) for choice in choices]
