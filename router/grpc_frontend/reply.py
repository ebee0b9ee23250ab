"""Answers as gRPC messages: pieces, usage, and errors as a status with trailers.

Knows no call. Stateless. An error's status says the same as its HTTP body (`error_body.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc

from baton.proto import client_pb2
from baton.router.answers.choice_text import ChoiceDelta, TokenLogprob
from baton.router.answers.request_handler import Usage
from baton.router.client_access.error_body import error_body, retry_after_s
from baton.router.text.tool_calls import new_call_id
from baton.runtime.errors import BatonError

REQUEST_ID = "x-request-id"
_FINISH = {
    "stop": client_pb2.STOP,
    "length": client_pb2.LENGTH,
    "tool_calls": client_pb2.TOOL_CALLS,
}
_Trailers = tuple[tuple[str, str], ...]


def pieces_reply(
    pieces: Sequence[ChoiceDelta], token_bytes: Callable[[int], bytes]
) -> client_pb2.GenerateResponse:
    return client_pb2.GenerateResponse(pieces=[_piece(piece, token_bytes) for piece in pieces])


def prompt_reply(
    entries: Sequence[TokenLogprob], token_bytes: Callable[[int], bytes]
) -> client_pb2.GenerateResponse:
    """Return the log-probabilities of the prompt's tokens from the second on."""
    scored = [_logprob(entry, token_bytes) for entry in entries[1:]]
    return client_pb2.GenerateResponse(prompt_logprobs=scored)


def usage_reply(usage: Usage) -> client_pb2.GenerateResponse:
    counts = client_pb2.Usage(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        cached_tokens=usage.cached,
        accepted_prediction_tokens=usage.accepted,
        rejected_prediction_tokens=usage.rejected,
    )
    return client_pb2.GenerateResponse(usage=counts)


def grpc_status(error: BatonError, request_id: str) -> tuple[grpc.StatusCode, str, _Trailers]:
    """Return code, message and trailers: the code and field of the HTTP body, and Retry-After."""
    body = error_body(error)["error"]
    trailers = [(REQUEST_ID, request_id), ("x-error-code", body["code"])]
    if body["param"]:
        field = body["param"].encode("unicode_escape").decode()
        trailers.append(("x-error-field", field))
    wait_s = retry_after_s(error)
    if wait_s:
        trailers.append(("retry-after", str(wait_s)))
    return grpc.StatusCode[error.grpc_code], body["message"], tuple(trailers)


def _piece(piece: ChoiceDelta, token_bytes: Callable[[int], bytes]) -> client_pb2.Piece:
    return client_pb2.Piece(
        choice=piece.choice,
        text=piece.text,
        reasoning=piece.reasoning,
        finish_reason=_FINISH[piece.finish] if piece.finish else client_pb2.NOT_FINISHED,
        logprobs=[_logprob(entry, token_bytes) for entry in piece.logprobs],
        tool_calls=[
            client_pb2.ToolCall(
                id=new_call_id(),
                type="function",
                function=client_pb2.FunctionCall(name=call.name, arguments=call.arguments),
            )
            for call in piece.calls
        ],
    )


def _logprob(entry: TokenLogprob, token_bytes: Callable[[int], bytes]) -> client_pb2.TokenLogprob:
    return client_pb2.TokenLogprob(
        token=entry.token,
        bytes=token_bytes(entry.token),
        logprob=entry.logprob,
        alternatives=[
            client_pb2.Alternative(token=token, bytes=token_bytes(token), logprob=logprob)
            for token, logprob in entry.top
        ],
        text_offset=entry.offset,
    )
