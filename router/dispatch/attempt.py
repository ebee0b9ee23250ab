"""An attempt: the part of a request that is, or will be, on one worker; its message, and the check
of what the worker answers.

Knows the request, its accepted tokens and its link. Owned by the dispatcher.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from opentelemetry.context import Context

from baton.proto import worker_pb2
from baton.router.dispatch.active_request import ActiveRequest, Finish, OutputToken
from baton.router.dispatch.prompt_logprobs import PromptScores, scores_of
from baton.router.dispatch.retry_budget import RetryPermit
from baton.router.fleet.placement import Placement
from baton.router.fleet.recent_prompts import RecentPrefills
from baton.router.fleet.worker_link import WorkerLink
from baton.router.fleet.worker_view import BlockFormat, WorkerView
from baton.runtime import logs, metrics
from baton.runtime.errors import EngineError, Overloaded, WorkerLost
from baton.runtime.links import LinkClosed
from baton.runtime.sampling import MAX_DRAFT_TOKENS

SUSPECT = 2  # hung steps; another request may have caused one

log = logs.get(__name__)


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt to serve the choices of a request that have not ended.

    - `link` is None while it is on no worker. `avoid` are the boot ids of workers that failed it,
      `short` of those that had no memory for it: a failure only once another worker has some.
    - `drains` is the number of its attempts that ended because a worker drained.
    - `candidates` are the boot ids of its prefill workers, `prefill` that of the one that is asked
      now or was asked last. `left` are those that a decode worker could not find: they are not
      candidates again. `answered`: an output has come since `prefill` was asked.
    - `prefilled`: its worker has the KV of the whole prompt. `local_reason` is why no prefill
      worker was asked.
    - `permit` is its share of the retry budget until its first output.
    - `identities` are those of its blocks, computed once while it waits for a worker.
    - `busy` is the error of the last worker that was full: the client gets it if no attempt serves.
    - `unconfirmed` is the weight of accepted outputs that its worker still keeps.
    - `hangs` counts the hung steps with it: from SUSPECT on it is computed alone, and one more
      ends it."""

    wire_id: str
    active_request: ActiveRequest
    choices: set[int]
    context: Context
    attempt: int = 1
    avoid: frozenset[bytes] = frozenset()
    drains: int = 0
    link: WorkerLink | None = None
    placing: asyncio.Task[None] | None = None
    prefill: bytes = b""
    answered: bool = False
    permit: RetryPermit | None = None
    short: frozenset[bytes] = frozenset()
    identities: dict[BlockFormat, list[bytes]] = field(default_factory=dict)
    busy: Overloaded | None = None
    candidates: frozenset[bytes] = frozenset()
    left: frozenset[bytes] = frozenset()
    unconfirmed: int = 0
    hangs: int = 0
    prefilled: bool = False
    local_reason: str = ""
    _begun: set[int] = field(default_factory=set)  # choices with an output, until `prefilled`

    @property
    def alone(self) -> bool:
        return self.hangs >= SUSPECT

    def resume(self) -> worker_pb2.Resume:
        """Return the message that asks for the rest: the open choices, each from its next index."""
        resume = worker_pb2.Resume(request_id=self.wire_id, attempt=self.attempt)
        for choice in sorted(self.choices):
            accepted = len(self.active_request.choices[choice].accepted)
            resume.next.add(choice=choice, index=accepted)
        return resume

    def record_switch(self, asked: worker_pb2.PrefillSwitch) -> None:
        """Record that the decode worker asks another prefill worker now, or none."""
        self.prefill = asked.prefill_boot_id if asked.prefill_boot_id in self.candidates else b""

    def record_output(self, token: OutputToken, recent_prefills: RecentPrefills) -> None:
        """Record an output, and where its prompt was prefilled once that is over: the first token
        of a choice comes before the last blocks, the second after them. A choice that ends with
        its first token needs no blocks, so it does not tell whether a handoff works."""
        self.answered = True
        if self.prefilled:
            return
        followed = token.choice in self._begun
        self._begun.add(token.choice)
        self.prefilled = followed or (token.finish is not None and not self.candidates)
        if self.prefilled:
            outcome = "failed" if self.candidates else self.local_reason
            now_s = asyncio.get_running_loop().time()
            recent_prefills.add("moved" if self.prefill else outcome, now_s)

    def waits_for(self, link: WorkerLink) -> bool:
        """Return whether the prefill worker of this link has still to compute the prompt."""
        return self.prefill == link.boot_id and not self.answered

    def send_cancel(self, *choices: int) -> None:
        """Cancel these choices on the worker, because a stop string has ended them; without any,
        cancel all that are left."""
        link = self.link
        if link is None or not link.up:
            return  # a parked worker drops what the next hello does not name
        cancel = worker_pb2.Cancel(request_id=self.wire_id, attempt=self.attempt, choices=choices)
        try:
            link.send(worker_pb2.RouterMessage(cancel=cancel))
        except (LinkClosed, Overloaded) as error:  # the link is about to break; see above
            name = self.active_request.request_id
            reason = str(error)
            log.info("cancel not sent", request_id=name, worker_id=link.worker_id, reason=reason)
        if not (choices and self.choices):
            link.settle(self.wire_id)

    @property
    def scored(self) -> bool:
        """Whether its worker scores the prompt: then cached blocks do not help."""
        return self.active_request.unscored and 0 in self.choices

    @property
    def length(self) -> int:
        """The number of its tokens."""
        accepted = 0
        if len(self.choices) == 1:
            (choice,) = self.choices
            accepted = len(self.active_request.choices[choice].accepted)
        return len(self.active_request.request.prompt) + accepted

    def tokens(self) -> tuple[int, ...]:
        """Return prompt and accepted tokens; several choices continue from the prompt alone."""
        if len(self.choices) > 1:
            return self.active_request.request.prompt
        (choice,) = self.choices
        return (*self.active_request.request.prompt, *self.active_request.choices[choice].accepted)

    @property
    def failures(self) -> int:
        """The number of failed attempts, this one included."""
        return self.attempt - self.drains

    def continued(self, failed_boot_id: bytes, drained: bool = False) -> list[Attempt]:
        """Return the next attempt; one for each choice if several continue from accepted tokens."""
        avoid, drains = self.avoid | {failed_boot_id}, self.drains + drained
        choices = self.active_request.choices
        if len(self.choices) == 1 or not any(choices[choice].accepted for choice in self.choices):
            parts = [(self.wire_id, self.choices)]
        else:
            parts = [(f"{self.wire_id}.{choice}", {choice}) for choice in sorted(self.choices)]
        return [
            Attempt(
                wire_id,
                self.active_request,
                part,
                self.context,
                self.attempt + 1,
                avoid,
                drains,
                short=self.short,
                busy=self.busy,
                left=self.left,
                hangs=self.hangs,
            )
            for wire_id, part in parts
        ]


def quarantine_error(attempt: Attempt, worker_id: str) -> EngineError:
    """Count and log a request that hung a worker alone, and return the error that ends it."""
    log.error(
        "request quarantined",
        request_id=attempt.active_request.request_id,
        worker_id=worker_id,
        hangs=attempt.hangs,
    )
    metrics.QUARANTINED_REQUESTS.inc()
    return EngineError(
        f"{attempt.hangs} workers hung on this request, the last of them with no other request in "
        "its step: send it with other parameters, or report it"
    )


def ended_before_loss(active_request: ActiveRequest, choice: int) -> Finish | None:
    """Return the finish reason of a choice whose last token was accepted while the message of its
    end was lost; None if it has not ended."""
    accepted = active_request.choices[choice].accepted
    if accepted and accepted[-1] in active_request.request.stop_token_ids:
        return "stop"
    if len(accepted) >= active_request.request.max_tokens:
        return "length"
    return None


def output_token(output: worker_pb2.Output) -> OutputToken:
    """Return a worker's output; without `finish` the choice continues."""
    return OutputToken(
        choice=output.choice,
        token=output.token if output.HasField("token") else None,
        logprob=output.logprob if output.HasField("logprob") else None,
        top=tuple((top.token, top.logprob) for top in output.top),
        finish=_FINISH.get(output.end),
        accepted_proposal=output.accepted_proposal,
        rejected_proposals=min(output.rejected_proposals, MAX_DRAFT_TOKENS),
    )


def build_submit(attempt: Attempt, placement: Placement, remaining_s: float) -> worker_pb2.Submit:
    """Return the message, without trace context. `remaining_s` is the time to the deadline."""
    active_request = attempt.active_request
    request = active_request.request
    sampling = request.sampling
    if request.scored and not attempt.scored:
        sampling = worker_pb2.Sampling()
        sampling.CopyFrom(request.sampling)
        sampling.ClearField("prompt_logprobs")
    return worker_pb2.Submit(
        request_id=attempt.wire_id,
        attempt=attempt.attempt,
        prompt=request.prompt,
        choices=[
            worker_pb2.Choice(choice=choice, accepted=active_request.choices[choice].accepted)
            for choice in sorted(attempt.choices)
        ],
        sampling=sampling,
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop_token_ids,
        placement=worker_pb2.Placement(
            local=placement.local,
            candidates=[_candidate(worker) for worker in placement.candidates],
            source=_source(placement),
        ),
        cache_salt=request.cache_salt,
        deadline_ms=max(1, int(remaining_s * 1000)),
        alone=attempt.alone,
    )


def _source(placement: Placement) -> worker_pb2.Source | None:
    source = placement.source
    if source is None:
        return None
    return worker_pb2.Source(
        worker=_candidate(source.worker),
        blocks=source.blocks,
        kv_dtype=source.worker.kv_format[1],
    )


def _candidate(worker: WorkerView) -> worker_pb2.Candidate:
    return worker_pb2.Candidate(
        worker_id=worker.worker_id,
        boot_id=worker.boot_id,
        address=worker.address,
        block_size=worker.block_size,
    )


_FINISH: dict[int, Finish] = {worker_pb2.STOP: "stop", worker_pb2.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class CheckedOutput:
    """`scores` are the prompt's log-probabilities where this output has to bring them."""

    token: OutputToken
    scores: PromptScores | None


def check_output(
    attempt: Attempt, output: worker_pb2.Output, vocab_size: int
) -> CheckedOutput | None:
    """Return the next output of its choice, or None where it was accepted before. Raises
    WorkerLost if it cannot follow what was accepted: the worker is not believed."""
    request = attempt.active_request
    accepted = len(request.choices[output.choice].accepted)
    if output.end == worker_pb2.CANCELLED:
        raise WorkerLost("the worker cancelled the request")
    if output.index < accepted:
        return None
    if output.index > accepted:
        raise WorkerLost("outputs are missing between two indices")
    token = output_token(output)
    if token.largest >= vocab_size:
        raise WorkerLost("a token is outside the model's vocabulary")
    scores = None
    if request.unscored and output.choice == 0 and token.token is not None:
        scores = scores_of(output.prompt_logprobs, len(request.request.prompt), vocab_size)
        if scores is None:
            raise WorkerLost("the prompt's log-probabilities are missing or malformed")
    return CheckedOutput(token, scores)
