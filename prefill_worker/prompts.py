"""The prompt of one handoff on a prefill worker, with the blocks that it holds and offers.

A `Prompt` is the `GrantedPrompt` of one handoff: the worker's loop adds events, the granter takes
them. The granter calls `end` exactly once, when the handoff is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from opentelemetry.context import Context

from baton.engine.scheduling.batch import Draw, Drawn, Scoring
from baton.engine.scheduling.token_history import history_of
from baton.kv_transfer.granter import Computed
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime.errors import BatonError
from baton.runtime.grammar.choice_masks import ChoiceMasks, TokenMask
from baton.runtime.sampling import SamplingParams
from baton.runtime.telemetry import timeline
from baton.runtime.telemetry.timeline import Timeline

Event: TypeAlias = Computed | handoff_pb2.FirstTokens | BatonError | None


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt and its blocks. From admission on `blocks` cover all tokens, until the prompt is
    over and no step computes on it any more; `pinned` of them have been offered. While it is the
    first of the queue, they are the leading ones that matched. A block in quarantine is -1."""

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    held_blocks: int  # leading blocks that the reader has
    params: SamplingParams
    choices: list[int]
    identities: list[bytes]  # of all full blocks
    tenant: bytes
    trace: Context
    arrived_wall_s: float
    on_end: Callable[[Prompt], None]
    source: worker_pb2.Source | None = None  # of leading blocks that another worker holds
    cache_salt: bytes = b""
    attempt: int = 0
    deadline_ms: int = 0  # as the opening has it
    admitted_wall_s: float = 0.0
    timeline: Timeline = field(init=False)  # in seconds of time.time()
    blocks: list[int] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    converted_each: int = 0  # targets of a block, if its reader stores KV in another dtype
    reserve: list[int] = field(default_factory=list)  # pinned targets of blocks not yet offered
    targets: list[int] = field(default_factory=list)  # of offered ones; the granter unpins them
    imprecise_source: bool = False  # its source stores KV less precisely than this worker
    private: bool = False  # from such KV: not for the prefix cache
    under_way: int = 0  # steps planned and not committed that compute a chunk of it
    cached: int = 0  # leading blocks that were matched, or READ from the source
    read: int = 0  # of these, the READ ones
    reading_to: int = 0  # blocks from `cached` to this one are leased: a READ fills them; 0: none
    offered: int = 0  # leading full blocks that were offered, or that the reader holds
    scores: worker_pb2.PromptLogprobs = field(default_factory=worker_pb2.PromptLogprobs)
    masks: ChoiceMasks | None = None  # of its grammar, if it has one
    allowed: TokenMask | None = None  # of the first token, the same for all choices
    ended: bool = False
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)  # <= chunks + 3

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.arrived_wall_s)

    async def next(self) -> Computed | handoff_pb2.FirstTokens | None:
        """Return the next event, in order; None after the last. Raises the error that ended the
        prompt."""
        event = await self.events.get()
        if isinstance(event, BatonError):
            raise event
        return event

    def constrain(self, masks: ChoiceMasks) -> None:
        """Hold the first tokens to a grammar; their mask is computed beside the prompt's chunks."""
        self.masks = masks
        self.allowed = masks.mask(start=True)

    def end(self) -> None:
        self.ended = True
        self.on_end(self)

    @property
    def unanswered(self) -> bool:
        """Return whether no token of its answer was drawn before, on another worker."""
        return len(self.tokens) == self.prompt_tokens

    @property
    def scored(self) -> bool:
        """Return whether the prompt's log-probabilities are wanted: then all of it is computed."""
        return self.params.prompt_logprobs is not None

    def scoring(self, start: int, end: int) -> Scoring | None:
        """Return which tokens a chunk of the tokens [start, end) has to score; None: none."""
        if self.params.prompt_logprobs is None:
            return None
        targets = self.tokens[start + 1 : min(end + 1, self.prompt_tokens)]
        return Scoring(targets, self.params.prompt_logprobs)

    def draws(self) -> tuple[Draw, ...]:
        """Return the first draw of every choice, all from the prompt's last logits."""
        params = self.params.at(len(self.tokens) - self.prompt_tokens)
        history = None
        if params.needs_history:
            history = history_of(self.tokens, self.prompt_tokens)
        position = len(self.tokens)
        return tuple(
            Draw(choice, position, params, history, self.allowed) for choice in self.choices
        )

    def first_tokens(self, drawn: Sequence[Drawn], block_size: int) -> handoff_pb2.FirstTokens:
        message = handoff_pb2.FirstTokens(cached_tokens=self.cached * block_size)
        timeline.write(self.timeline, message.timeline)
        if self.scored:
            message.prompt_logprobs.CopyFrom(self.scores)
        for token in drawn:
            first = message.tokens.add(choice=token.choice, token=token.token)
            if token.logprob is not None:
                first.logprob = token.logprob
                for entry, logprob in token.top:
                    first.top.add(token=entry, logprob=logprob)
        return message
