"""Checks a worker's output against what its request has accepted, before it is accepted. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.proto import worker_pb2
from baton.router.dispatch.active_request import OutputToken
from baton.router.dispatch.attempt import Attempt, output_token
from baton.router.dispatch.prompt_logprobs import PromptScores, scores_of
from baton.runtime.errors import WorkerLost


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
    request = attempt.generation
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
