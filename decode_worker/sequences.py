"""The state of a request on a decode worker: its groups and its sequences.

    Request ─┬─ Group: sequences whose tokens are still the same, prefilled once
             └─ Sequence: one choice, its output and its block table

A request starts as one group of all its choices. Once the group's KV is here, its sequences
run alone. A preempted sequence becomes a group of one. The scheduler owns all of these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from opentelemetry.context import Context

from baton.decode_worker.draft_progress import DraftProgress
from baton.decode_worker.request_timeline import RequestTimeline
from baton.engine.scheduling.batch import DraftWork, Draw, Drawn, Scores, Scoring, Slice
from baton.engine.scheduling.token_history import History, PromptTokens, Text
from baton.engine.scheduling.verification import with_proposals
from baton.engine.speculation.draft_length import SequenceDraft
from baton.engine.speculation.proposer import ProposerState
from baton.proto import worker_pb2
from baton.runtime.grammar.choice_masks import ChoiceMasks
from baton.runtime.identity import tenant_of
from baton.runtime.sampling import SamplingParams
from baton.runtime.wire import extend_scores

RequestUpdate: TypeAlias = worker_pb2.Output | worker_pb2.PrefillSwitch  # sent to its router


class Phase(Enum):
    """The phase of a group. WAITING holds no blocks; the others do."""

    WAITING = "waiting"  # for decode credit
    FETCHING = "fetching"  # its handoff is open; blocks are leased
    PREFILLING = "prefilling"  # computed here, chunk by chunk
    RUNNING = "running"  # its sequences are in the batch; the group is history
    OVER = "over"


# The reason for prefilling a group on this worker; None: a prefill worker does.
Local: TypeAlias = Literal["placed", "no_candidate", "recompute"] | None


@dataclass(slots=True, eq=False)
class Request:
    """One Submit. `ended` once every choice has ended."""

    request_id: str
    attempt: int
    prompt: list[int]
    sampling: SamplingParams
    wire_sampling: worker_pb2.Sampling  # the same, as a handoff carries it
    max_tokens: int
    stop_token_ids: frozenset[int]
    local: bool
    candidates: list[worker_pb2.Candidate]
    cache_salt: bytes
    root: bytes  # identity before the first block
    trace: Context
    arrived_s: float  # of the loop's clock
    arrived_wall_s: float  # of time.time(), for spans
    emit: Callable[[RequestUpdate], None]
    source: worker_pb2.Source | None = None  # where a prefill worker may READ leading blocks
    sequences: list[Sequence] = field(default_factory=list)
    admitted: bool = False  # its first group had credit once
    cached_tokens: int = 0
    first_token_wall_s: float = 0.0  # 0: none yet
    batched_wall_s: float = 0.0  # its handoff over, it entered the batch; 0: it had none
    deadline: asyncio.TimerHandle | None = None
    reported_prefill: bytes = b""  # boot id of the prefill worker last reported to the router
    counted: PromptTokens | None = None  # the prompt as penalties count it, for all choices
    alone: bool = False  # shares no step with another request
    last_turn: int = 0  # the last step planned for it alone
    prompt_logprobs: worker_pb2.PromptLogprobs | None = None  # computed, or on their way
    failed_prefills: list[bytes] = field(default_factory=list)  # boot ids, each once
    timeline: RequestTimeline = field(init=False)  # in seconds of time.time()

    def __post_init__(self) -> None:
        self.timeline = RequestTimeline(self.arrived_wall_s)

    @property
    def tenant(self) -> bytes:
        return tenant_of(self.cache_salt)

    @property
    def ended(self) -> bool:
        return all(sequence.ended for sequence in self.sequences)

    @property
    def unscored(self) -> int | None:
        """Return how many alternatives are wanted of each prompt token; None if none are, or once
        the first choice has its first token, with which the prompt's log-probabilities go out."""
        return None if self.sequences[0].output else self.sampling.prompt_logprobs

    def left_ms(self, now_s: float) -> int:
        """Return the milliseconds to its deadline, at least 1; 0: it has no deadline."""
        return 0 if self.deadline is None else max(1, round(1000 * (self.deadline.when() - now_s)))


@dataclass(slots=True, eq=False)
class Proposals:
    """The proposals of one sequence, and the state of its proposer. The speculator owns it."""

    draft: SequenceDraft  # what the policy knows
    state: ProposerState | None = None  # the proposer's; None until a draft is wanted
    known: int = 0  # tokens that the proposer has
    wanted: int = 0  # of the next step
    proposed: int = 0  # in all steps so far
    accepted: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice. `blocks` cover `computed` tokens and the next one to compute.

    A step that is under way computes one token more and draws the one after it. The step planned
    beside it takes that token on the device: it is slice `batch_index` of the step before.
    """

    request: Request
    choice: int
    output: list[int]
    blocks: list[int] = field(default_factory=list)
    identities: list[bytes] = field(default_factory=list)  # of the full blocks computed
    private: bool = False  # its group's KV was
    computed: int = 0  # tokens whose KV is in `blocks`
    under_way: int = 0  # steps planned and not committed that compute on it
    batch_index: int = 0  # of its slice in the newest of them
    promised: int = 0  # blocks of its credit that it alone will need
    shared: int = 0  # leading blocks that a sibling's credit counts
    counted_by: Sequence | None = None  # that sibling
    ended: bool = False
    masks: ChoiceMasks | None = None  # of its grammar, if it has one
    text: Text | None = None  # what penalties count, if it has any
    proposals: Proposals | None = None  # where the worker speculates, once it has proposed
    draft_kv: DraftProgress | None = None  # where a draft model proposes

    @property
    def shareable(self) -> int:
        """Return how many leading tokens have all KV that a published block holds."""
        draft_kv = self.draft_kv
        return self.computed if draft_kv is None else min(self.computed, draft_kv.computed)

    def advance(self, tokens: int, item: Slice, *, drafted: bool = True) -> None:
        """Count the tokens that a step computed of its slice. `drafted`: the step had memory for
        the slice's draft work too."""
        self.computed += tokens
        if self.draft_kv is not None:
            self.draft_kv.commit(item, self.computed, ran=drafted)

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.output)

    def token_at(self, position: int) -> int:
        prompt = self.request.prompt
        return prompt[position] if position < len(prompt) else self.output[position - len(prompt)]

    def span(self, start: int, end: int) -> list[int]:
        """Return tokens [start, end) of prompt and output."""
        boundary = len(self.request.prompt)
        if start >= boundary:
            return self.output[start - boundary : end - boundary]
        if end <= boundary:
            return self.request.prompt[start:end]
        return self.request.prompt[start:] + self.output[: end - boundary]

    def draw(self, proposed: int = 0) -> Draw:
        """Return the draw of the next token that no step under way draws, or of the token after
        so many proposals, which its history lacks."""
        request, ahead = self.request, self.under_way + proposed
        sampling, index = request.sampling, len(self.output) + ahead
        return Draw(
            choice=self.choice,
            position=len(request.prompt) + index,
            params=sampling.at(index) if sampling.min_tokens else sampling,
            history=self._history() if sampling.needs_history else None,
            allowed=None if self.masks is None else self.masks.mask(start=ahead == 0),
        )

    def _history(self) -> History:
        if self.text is None:
            request = self.request
            request.counted = request.counted or PromptTokens(request.prompt)
            self.text = Text(request.counted, self.output)
        return self.text.until(len(self.output))

    def next_slice(self) -> Slice:
        """Return the slice of its next token, which a step under way draws, or which is known."""
        start, fed = self.computed + self.under_way, self.under_way > 0
        token = 0 if fed else self.token_at(start)
        feed = self.batch_index if fed else None
        work = None
        if self.draft_kv is not None and self.draft_kv.is_behind(start):
            work = self.draft_kv.plan(start, 0, self.span)
        return Slice([token], start, tuple(self.blocks), (self.draw(),), feed, draft=work)

    def verification_slice(self, proposals: list[int]) -> Slice:
        """Return the slice that verifies tokens after the last one, which no step computes."""
        start, draws = self.computed, tuple(map(self.draw, range(len(proposals) + 1)))
        item = Slice([self.token_at(start)], start, tuple(self.blocks), draws)
        return with_proposals(item, proposals)

    def draft_slice(self, proposals: int) -> Slice:
        """Return the slice for which a draft model makes so many proposals in the step itself."""
        assert self.draft_kv is not None
        start, draws = self.computed, tuple(map(self.draw, range(proposals + 1)))
        work = self.draft_kv.plan(start, proposals, self.span)
        return Slice([self.token_at(start)], start, tuple(self.blocks), draws, draft=work)

    def until_end(self, drawn: tuple[Drawn, ...]) -> tuple[Drawn, ...]:
        """Return the drawn tokens up to the first that ends the sequence."""
        stops = self.request.stop_token_ids
        for count, each in enumerate(drawn[: self.growth_left], 1):
            if each.token in stops:
                return drawn[:count]
        return drawn[: self.growth_left]

    @property
    def wants_token(self) -> bool:
        """Return whether a step could draw a token beyond those of the steps under way."""
        # `growth_left` written out, since each step asks this of each sequence
        return not self.ended and self.under_way < self.request.max_tokens - len(self.output)

    @property
    def growth_left(self) -> int:
        return self.request.max_tokens - len(self.output)


@dataclass(slots=True, eq=False)
class Group:
    """Sequences with the same tokens, on their way to having their KV here."""

    request: Request
    sequences: list[Sequence]
    tokens: list[int]
    identities: list[bytes]  # of all full blocks of `tokens`
    local: Local
    recomputed_tokens: int = 0  # leading tokens computed or drawn before a preemption
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    under_way: int = 0  # steps planned and not committed that compute a chunk of it
    held: int = 0  # leading blocks that were matched here
    private: bool = False  # fetched from less precise KV: not for the prefix cache
    spares: list[int] = field(default_factory=list)  # for the siblings' own partial last block
    prefill_wall_s: float = 0.0  # of time.time(): when its prefill here began, for spans

    @property
    def arrived_s(self) -> float:
        return self.request.arrived_s

    @property
    def unanswered(self) -> bool:
        """Return whether no token of its answer was drawn before, here or on another worker."""
        return len(self.tokens) == len(self.request.prompt)

    @property
    def scored(self) -> bool:
        """Return whether the log-probabilities of its prompt are still wanted."""
        request = self.request
        return request.unscored is not None and request.sequences[0] in self.sequences

    @property
    def masked(self) -> bool:
        """Return whether a grammar masks its draws."""
        return any(sequence.masks is not None for sequence in self.sequences)

    def chunk_slice(self, start: int, end: int, draws: tuple[Draw, ...]) -> Slice:
        """Return the slice that computes tokens [start, end) and scores the tokens after them."""
        top = self.request.unscored if self.scored else None
        scoring = None if top is None else Scoring(self.tokens[start + 1 : end + 1], top)
        tokens, blocks = self.tokens[start:end], tuple(self.blocks)
        return Slice(tokens, start, blocks, draws, scoring=scoring, draft=DraftWork())

    def expect_scores(self) -> None:
        """Start collecting scores: the prompt is computed here, from its start if it is scored."""
        scores = worker_pb2.PromptLogprobs() if self.scored else None
        self.request.prompt_logprobs = scores

    def take_scores(self, scores: Scores) -> None:
        """Append the scores of the next chunk."""
        if self.request.prompt_logprobs is not None:
            extend_scores(self.request.prompt_logprobs, scores)

    def undrawn(self) -> list[Sequence]:
        """Return the sequences without a first token, which a handoff that failed may have sent."""
        return [s for s in self.sequences if s.length == len(self.tokens)]

    @property
    def promised(self) -> int:
        """Blocks of its credit."""
        return sum(sequence.promised for sequence in self.sequences if not sequence.ended)

    @property
    def live(self) -> bool:
        """Return whether a sequence still needs its KV."""
        return any(not sequence.ended for sequence in self.sequences)
