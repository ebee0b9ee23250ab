"""A request as the router carries it on: validated, tokenized, with every default filled in.

Made by `validation.py` alone; whoever holds one may trust it. Knows no HTTP and no workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.proto import worker_pb2
from baton.router.tool_calls import Calling


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`max_tokens` bounds the output of each choice and fits the context. `stop_token_ids`
    holds the model's end tokens, unless the client ignores them. `sampling` has its seed.
    `cache_salt` is the client's own until the request is given to the dispatcher, then its
    tenant's."""

    prompt: tuple[int, ...]
    sampling: worker_pb2.Sampling
    max_tokens: int
    choices: int = 1
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: bytes = b""
    stream: bool = False
    include_usage: bool = False
    calling: Calling | None = None  # None: an answer is content, whatever it looks like

    @property
    def logprobs(self) -> bool:
        return self.sampling.HasField("top_logprobs")
