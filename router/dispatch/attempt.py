"""A submission: what one worker holds, or is to hold, of a request; and its message.

Knows the request, its accepted tokens and its link. Owned by the dispatcher.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from opentelemetry.context import Context

from baton.proto import worker_pb2
from baton.router.dispatch.active_request import ActiveRequest, Finish, OutputToken
from baton.router.dispatch.retry_budget import RetryPermit
from baton.router.fleet.placement import Placement
from baton.router.fleet.worker_link import WorkerLink
from baton.router.fleet.worker_view import Shape
from baton.runtime import logs, metrics
from baton.runtime.errors import EngineError, Overloaded
from baton.runtime.links import LinkClosed
from baton.runtime.sampling import MAX_DRAFT_TOKENS

SUSPECT = 2  # steps with a request hung: one of them may have been another's fault

log = logs.get(__name__)


@dataclass(slots=True, eq=False)
class Attempt:
    """`choices` are those not yet ended. `link` is None while it is on no worker; `avoid` are
    boot ids that failed it; `drains` of its attempts ended because a worker drained. `prefill`
    is the boot id of the prefill worker that is asked now, or was asked last: the first candidate
    until another is told; `answered`: an output has come since. `move` is its hold on the budget
    until its first output. `short` are the boot ids of workers that had no memory for it: their
    fault only once another one has some. `identities` are those of its blocks, computed once
    while it waits for a worker. `busy` is what the last full worker said of it: if no attempt
    serves, that is what its client can act on. `candidates` are the boot ids of the prefill
    workers of this attempt, `left` those that a decode worker did not find any more: they are
    asked no second time, whatever is known here. `unconfirmed` is the weight of what was accepted
    since its worker was told so. `hangs` are the steps with it that hung: from SUSPECT on
    it is computed alone, and after one more it fails."""

    wire_id: str
    generation: ActiveRequest
    choices: set[int]
    context: Context
    attempt: int = 1
    avoid: frozenset[bytes] = frozenset()
    drains: int = 0
    link: WorkerLink | None = None
    placing: asyncio.Task[None] | None = None
    prefill: bytes = b""
    answered: bool = False
    move: RetryPermit | None = None
    short: frozenset[bytes] = frozenset()
    identities: dict[Shape, list[bytes]] = field(default_factory=dict)
    busy: Overloaded | None = None
    candidates: frozenset[bytes] = frozenset()
    left: frozenset[bytes] = frozenset()
    unconfirmed: int = 0
    hangs: int = 0

    @property
    def alone(self) -> bool:
        return self.hangs >= SUSPECT

    def resume(self) -> worker_pb2.Resume:
        """What the router still waits for of it: its open choices, each from the next index."""
        resume = worker_pb2.Resume(request_id=self.wire_id, attempt=self.attempt)
        for choice in sorted(self.choices):
            accepted = len(self.generation.choices[choice].accepted)
            resume.next.add(choice=choice, index=accepted)
        return resume

    def asks(self, asked: worker_pb2.PrefillSwitch) -> None:
        """Its decode worker has turned to another prefill worker, or to none."""
        self.prefill = asked.prefill_boot_id if asked.prefill_boot_id in self.candidates else b""

    def waits_for(self, link: WorkerLink) -> bool:
        """Whether a prefill worker is to compute its prompt still."""
        return self.prefill == link.boot_id and not self.answered

    def tell_cancel(self, *choices: int) -> None:
        """Its worker is to end these choices, which a stop string has ended, or all that are left
        where none is named."""
        link = self.link
        if link is None or not link.up:
            return  # a parked worker drops what the next hello does not name
        cancel = worker_pb2.Cancel(request_id=self.wire_id, attempt=self.attempt, choices=choices)
        try:
            link.send(worker_pb2.RouterMessage(cancel=cancel))
        except (LinkClosed, Overloaded) as error:  # the link is about to break; see above
            name = self.generation.request_id
            log.info("cancel not sent", request_id=name, worker_id=link.worker_id, why=str(error))
        if not (choices and self.choices):
            link.settle(self.wire_id)

    @property
    def scored(self) -> bool:
        """Whether its worker is to score the prompt: then no cached block helps."""
        return self.generation.unscored and 0 in self.choices

    @property
    def length(self) -> int:
        """Of its tokens."""
        accepted = 0
        if len(self.choices) == 1:
            (choice,) = self.choices
            accepted = len(self.generation.choices[choice].accepted)
        return len(self.generation.request.prompt) + accepted

    def tokens(self) -> tuple[int, ...]:
        """Prompt and accepted tokens; several choices go on from the prompt alone."""
        if len(self.choices) > 1:
            return self.generation.request.prompt
        (choice,) = self.choices
        return (*self.generation.request.prompt, *self.generation.choices[choice].accepted)

    @property
    def failures(self) -> int:
        """Attempts that have failed, if this one has too."""
        return self.attempt - self.drains

    def continued(self, failed_boot_id: bytes, drained: bool = False) -> list[Attempt]:
        """The next attempt: one submission, or one for each choice if several go on from
        accepted tokens."""
        avoid, drains = self.avoid | {failed_boot_id}, self.drains + drained
        choices = self.generation.choices
        if len(self.choices) == 1 or not any(choices[choice].accepted for choice in self.choices):
            parts = [(self.wire_id, self.choices)]
        else:
            parts = [(f"{self.wire_id}.{choice}", {choice}) for choice in sorted(self.choices)]
        return [
            Attempt(
                wire_id,
                self.generation,
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


def hangs_workers(submission: Attempt, worker_id: str) -> EngineError:
    """Why a request that hung a worker alone is computed nowhere else."""
    log.error(
        "request quarantined",
        request_id=submission.generation.request_id,
        worker_id=worker_id,
        hangs=submission.hangs,
    )
    metrics.QUARANTINED_REQUESTS.inc()
    return EngineError(
        f"{submission.hangs} workers stopped computing at this request, the last of them with "
        "nothing else in its step: send it with other parameters, or report it"
    )


def ended_before_loss(generation: ActiveRequest, choice: int) -> Finish | None:
    """How a choice ended whose last token was accepted before its end was told, if it did."""
    accepted = generation.choices[choice].accepted
    if accepted and accepted[-1] in generation.request.stop_token_ids:
        return "stop"
    if len(accepted) >= generation.request.max_tokens:
        return "length"
    return None


def output_token(output: worker_pb2.Output) -> OutputToken:
    """What a worker says of one token; no finish: the choice goes on."""
    return OutputToken(
        choice=output.choice,
        token=output.token if output.HasField("token") else None,
        logprob=output.logprob if output.HasField("logprob") else None,
        top=tuple((top.token, top.logprob) for top in output.top),
        finish=_FINISH.get(output.end),
        accepted_proposal=output.accepted_proposal,
        rejected_proposals=min(output.rejected_proposals, MAX_DRAFT_TOKENS),
    )


def build_submit(
    submission: Attempt, placement: Placement, remaining_s: float
) -> worker_pb2.Submit:
    """The message, without trace context. `remaining_s` is what is left of the request's life."""
    generation = submission.generation
    request = generation.request
    sampling = request.sampling
    if request.scored and not submission.scored:
        sampling = worker_pb2.Sampling()
        sampling.CopyFrom(request.sampling)
        sampling.ClearField("prompt_logprobs")
    return worker_pb2.Submit(
        request_id=submission.wire_id,
        attempt=submission.attempt,
        prompt=request.prompt,
        choices=[
            worker_pb2.Choice(choice=choice, accepted=generation.choices[choice].accepted)
            for choice in sorted(submission.choices)
        ],
        sampling=sampling,
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop_token_ids,
        placement=worker_pb2.Placement(
            local=placement.local,
            candidates=[
                worker_pb2.Candidate(
                    worker_id=worker.worker_id, boot_id=worker.boot_id, address=worker.address
                )
                for worker in placement.candidates
            ],
        ),
        cache_salt=request.cache_salt,
        deadline_ms=max(1, int(remaining_s * 1000)),
        alone=submission.alone,
    )


_FINISH: dict[int, Finish] = {worker_pb2.STOP: "stop", worker_pb2.LENGTH: "length"}
