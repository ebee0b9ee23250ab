"""Turns messages into values, each checked against this worker's bounds.

The router has validated the client's request; a worker still trusts no integer of a message.
Prefill and decode workers share this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from baton.proto import worker_pb2
from baton.runtime import identity
from baton.runtime.errors import HandoffError, InvalidRequest
from baton.runtime.links import LINK_PROTOCOL_VERSION
from baton.runtime.sampling import MAX_LOGPROBS, SamplingParams

MAX_CHOICES = 128
MAX_BIAS = 4096
MAX_BARRED = 1024
MAX_DEGRADED_PEERS = 64  # of a load report
MIN_GB_PER_S = 1e-6  # of a peer: slower counts as this


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The bounds of this worker's model and pool, the key of its blocks' identities, and where it
    is, from the outermost level to its host."""

    vocab_size: int
    max_context: int  # tokens of prompt and output
    fingerprint: str
    kv_dtype: str
    key: bytes  # of identities
    topology: str = ""  # protobuf's absent value, as below
    kv_terms: str = ""  # what its peers' handshakes must have alike, see kv_transfer/handshake.py

    def root(self, salt: bytes) -> bytes:
        return identity.root(self.key, self.fingerprint, self.kv_dtype, salt=salt)

    def hello(
        self, worker_id: str, boot_id: bytes, role: str, block_size: int, total_blocks: int
    ) -> worker_pb2.WorkerHello:
        """Return the facts of a worker for its hello; the caller adds the requests that it lost."""
        return worker_pb2.WorkerHello(
            protocol_version=LINK_PROTOCOL_VERSION,
            worker_id=worker_id,
            boot_id=boot_id,
            role=role,
            model_fingerprint=self.fingerprint,
            kv_dtype=self.kv_dtype,
            block_size=block_size,
            max_context=self.max_context,
            total_blocks=total_blocks,
            vocab_size=self.vocab_size,
            topology=self.topology,
            kv_terms=self.kv_terms,
        )


def sampling_params(message: worker_pb2.Sampling, vocab_size: int) -> SamplingParams:
    """Raises InvalidRequest naming the value that is out of range."""
    numbers = {
        "temperature": (message.temperature, 0.0, 100.0),
        "top_p": (message.top_p, 0.0, 1.0),
        "min_p": (message.min_p, 0.0, 1.0),
        "repetition_penalty": (message.repetition_penalty, 1e-3, 100.0),
        "frequency_penalty": (message.frequency_penalty, -100.0, 100.0),
        "presence_penalty": (message.presence_penalty, -100.0, 100.0),
    }
    for name, (value, low, high) in numbers.items():
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidRequest(f"{name} is {value}, not from {low} to {high}", field=name)
    if message.top_p == 0.0:
        raise InvalidRequest("top_p is 0: give a value above 0", field="top_p")
    top = message.top_logprobs if message.HasField("top_logprobs") else None
    if top is not None and top > MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs is {top}, over {MAX_LOGPROBS}", field="top_logprobs")
    if len(message.barred) > MAX_BARRED or len(message.barred) >= vocab_size:
        raise InvalidRequest("too many tokens are barred by min_tokens", field="min_tokens")
    check_tokens(message.barred, "min_tokens", vocab_size)
    scored = message.prompt_logprobs if message.HasField("prompt_logprobs") else None
    if scored is not None and scored > MAX_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs is {scored}, over {MAX_LOGPROBS}", field="prompt_logprobs"
        )
    return SamplingParams(
        temperature=message.temperature,
        top_k=min(message.top_k, vocab_size),  # a device counts in 32 bits; of all is of none
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=_logit_bias(message, vocab_size),
        seed=message.seed,
        top_logprobs=top,
        min_tokens=message.min_tokens,
        barred=tuple(message.barred),
        prompt_logprobs=scored,
    )


def _logit_bias(message: worker_pb2.Sampling, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not message.logit_bias:
        return ()
    bias = tuple(sorted(message.logit_bias.items()))
    if len(bias) > MAX_BIAS or any(token >= vocab_size for token, _ in bias):
        raise InvalidRequest("logit_bias names too many or unknown tokens", field="logit_bias")
    if not all(math.isfinite(value) for _, value in bias):
        raise InvalidRequest("logit_bias holds a number that is not finite", field="logit_bias")
    return bias


class PromptScores(Protocol):
    """The log-probabilities of some tokens of a prompt, as an engine gives them."""

    logprobs: list[float]
    ranks: list[int]
    top_tokens: list[int]
    top_logprobs: list[float]


def extend_scores(message: worker_pb2.PromptLogprobs, scores: PromptScores) -> None:
    """Add those of the chunk that follows."""
    message.logprobs.extend(scores.logprobs)
    message.ranks.extend(scores.ranks)
    message.top_tokens.extend(scores.top_tokens)
    message.top_logprobs.extend(scores.top_logprobs)


def check_scores(
    scores: worker_pb2.PromptLogprobs, prompt_tokens: int, top: int, vocab_size: int
) -> None:
    """Raises HandoffError unless these are those of such a prompt."""
    count, best = prompt_tokens - 1, (prompt_tokens - 1) * min(top, vocab_size)
    lengths = len(scores.logprobs), len(scores.ranks), len(scores.top_tokens)
    if (*lengths, len(scores.top_logprobs)) != (count, count, best, best):
        raise HandoffError(f"the prompt of {prompt_tokens} tokens has {lengths[0]} logprobs")
    if max(scores.top_tokens, default=0) >= vocab_size:
        raise HandoffError("a token of the prompt's logprobs is outside the vocabulary")


def degraded_peers(load: worker_pb2.Load) -> dict[bytes, float]:
    """Return the GB/s by boot id (16 bytes) of the peers that a load report calls degraded, of
    which only the first MAX_DEGRADED_PEERS are looked at."""
    return {
        peer.boot_id: peer.gb_per_s if peer.gb_per_s > MIN_GB_PER_S else MIN_GB_PER_S
        for peer in load.degraded_peers[:MAX_DEGRADED_PEERS]
        if len(peer.boot_id) == 16
    }


def check_tokens(tokens: Iterable[int], field: str, vocab_size: int) -> None:
    """Raises InvalidRequest if a token is outside the vocabulary."""
    if max(tokens, default=0) >= vocab_size:
        raise InvalidRequest(f"a token of {field} is outside the vocabulary", field=field)
