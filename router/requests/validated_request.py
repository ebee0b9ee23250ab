"""A validated request: tokenized, with every default filled in.

Only `validator.py` makes one, so its fields need no further check. Knows no HTTP and no workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.proto import worker_pb2
from baton.router.text.call_form import CallableTools
from baton.router.text.reasoning import AnswerReasoning


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
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
    echo: str | None = None  # the prompt's text, to come before each choice
    echo_top: int | None = None  # alternatives beside the echo's tokens; None: no logprobs
    prompt_top: int | None = None  # alternatives of `prompt_logprobs`; None: not asked for
    chat: bool = False
    silent: bool = False  # nothing is generated for the client: the one token is dropped
    token_ids: bool = False
    continuous_usage: bool = False
    grammar_wall_s: tuple[float, float] | None = None  # when its grammar was validated
    reasoning: AnswerReasoning | None = None  # None: an answer is content from its start
    calling: CallableTools | None = None  # None: an answer is content, whatever it looks like

    @property
    def logprobs(self) -> bool:
        return self.sampling.HasField("top_logprobs")

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of the prompt's tokens are wanted."""
        return self.sampling.HasField("prompt_logprobs")
