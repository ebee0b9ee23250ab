"""Attributes of a request's span by OpenTelemetry's conventions for generative AI (v0.1.0).

None holds text of a client: stop sequences, messages and tools, which the conventions know too,
are left out.
"""

from __future__ import annotations

from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime.exposition.genai import PROVIDER, operation_name
from baton.runtime.telemetry.tracing import Attribute


def request_attributes(model: str, request: ValidatedRequest) -> dict[str, Attribute]:
    """Return what the request asks of the served `model`. Values that are off are left out; the
    seed is the client's or, without one, the router's."""
    sampling = request.sampling
    found: dict[str, Attribute] = {
        "gen_ai.operation.name": operation_name(chat=request.chat),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.stream": request.stream,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed < 1 << 63:  # an attribute is a signed number of 64 bits
        found["gen_ai.request.seed"] = sampling.seed
    if request.choices != 1:
        found["gen_ai.request.choice.count"] = request.choices
    return found
