"""Pieces and errors as gRPC messages and statuses."""

from __future__ import annotations

import math

import grpc
import pytest

from baton.proto import client_pb2
from baton.router.answers.choice_text import ChoiceDelta, TokenLogprob
from baton.router.answers.request_handler import Usage
from baton.router.grpc_frontend.reply import grpc_status, pieces_reply, usage_reply
from baton.router.text.tool_calls import ParsedCall
from baton.runtime import errors
from baton.runtime.errors import (
    BatonError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    TooLarge,
    Unauthenticated,
    Unavailable,
    WorkerLost,
)

CODE = grpc.StatusCode


def token_bytes(token: int) -> bytes:
    return bytes([token])


@pytest.mark.parametrize(
    ("error", "code", "named", "wait"),
    [
        (InvalidRequest("no", "n"), CODE.INVALID_ARGUMENT, "invalid_value", None),
        (NotFound("no", "model"), CODE.NOT_FOUND, "model_not_found", None),
        (TooLarge("no"), CODE.RESOURCE_EXHAUSTED, "body_too_large", None),
        (Unauthenticated("no"), CODE.UNAUTHENTICATED, "invalid_api_key", None),
        (Overloaded("no", 2.2), CODE.UNAVAILABLE, "overloaded", "3"),
        (RateLimited("no", 0.1), CODE.RESOURCE_EXHAUSTED, "rate_limit_exceeded", "1"),
        (Unavailable("no"), CODE.UNAVAILABLE, "unavailable", "1"),
        (WorkerLost("no"), CODE.UNAVAILABLE, "worker_lost", "1"),
        (DeadlineExceeded("no"), CODE.DEADLINE_EXCEEDED, "deadline_exceeded", None),
        (Cancelled("no"), CODE.CANCELLED, "cancelled", None),
        (BatonError("a secret"), CODE.INTERNAL, "internal_error", None),
        (ConfigError("a secret"), CODE.INTERNAL, "internal_error", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BatonError) else None,
)
def test_each_error_has_its_status_and_its_trailers(
    error: BatonError, code: grpc.StatusCode, named: str, wait: str | None
) -> None:
    got, message, trailers = grpc_status(error, "req-1")
    reported = dict(trailers)
    assert got is code and "secret" not in message
    assert reported["x-request-id"] == "req-1" and reported["x-error-code"] == named
    assert reported.get("retry-after") == wait
    assert reported.get("x-error-field") == getattr(error, "field", None)
    assert message == "no" or code is CODE.INTERNAL


def test_every_error_of_the_tree_has_a_status_that_is_gprcs() -> None:
    classes = [found for found in vars(errors).values() if isinstance(found, type)]
    found = {each for each in classes if issubclass(each, BatonError)}
    assert len(found) > 15
    for each in found:
        assert grpc_status(each("x"), "r")[0] is CODE[each.grpc_code] is not CODE.OK


def test_a_field_that_is_no_ascii_may_stand_in_a_trailer() -> None:
    trailers = dict(grpc_status(InvalidRequest("é", "logit_bias.é\n"), "r")[2])
    assert trailers["x-error-field"] == r"logit_bias.\xe9\n"


def test_pieces() -> None:
    logprob = TokenLogprob(65, -0.5, ((66, -1.0), (200, -math.inf)), 3)
    piece = ChoiceDelta(2, "text", [logprob], "tool_calls", [ParsedCall(0, "f", '{"a": 1}')])
    reply = pieces_reply([piece, ChoiceDelta(0, "é")], token_bytes)
    assert not reply.HasField("usage")
    first, second = reply.pieces
    assert (first.choice, first.text) == (2, "text")
    assert first.finish_reason == client_pb2.TOOL_CALLS
    (reported,) = first.logprobs
    assert (reported.token, reported.bytes, reported.logprob, reported.text_offset) == (
        65,
        b"A",
        -0.5,
        3,
    )
    assert [(each.token, each.bytes, each.logprob) for each in reported.alternatives] == [
        (66, b"B", -1.0),
        (200, b"\xc8", -math.inf),
    ]
    (call,) = first.tool_calls
    assert call.id.startswith("call_") and call.type == "function"
    assert (call.function.name, call.function.arguments) == ("f", '{"a": 1}')
    assert (second.choice, second.text) == (0, "é")
    assert second.finish_reason == client_pb2.NOT_FINISHED and not second.logprobs


@pytest.mark.parametrize(
    ("finish", "reported"), [("stop", client_pb2.STOP), ("length", client_pb2.LENGTH)]
)
def test_finish_reasons(finish: str, reported: int) -> None:
    (piece,) = pieces_reply([ChoiceDelta(0, finish=finish)], token_bytes).pieces
    assert piece.finish_reason == reported


def test_usage_is_a_message_of_its_own() -> None:
    reply = usage_reply(Usage(5, 7, cached=4, accepted=3, rejected=2))
    assert not reply.pieces
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 7, 4)
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (3, 2)
