"""The schemas of answers name every field that an answer can hold."""

from __future__ import annotations

import json

import jsonschema
import pytest

from baton.router.answers.choice_text import ChoiceDelta, TokenLogprob
from baton.router.answers.request_handler import Usage
from baton.router.client_access.error_body import error_body
from baton.router.http_frontend.answer_schemas import COMPONENTS
from baton.router.http_frontend.openai_answer import ChatRenderer, CompletionRenderer, ResponseHead
from baton.router.text.tool_calls import ParsedCall
from baton.runtime.errors import InvalidRequest
from tests.support.json_values import Json

USAGE = Usage(prompt=2, completion=2, cached=1, accepted=1, rejected=0)
FIRST, SECOND = (
    TokenLogprob(97, None, (), 0),
    TokenLogprob(98, -0.5, ((99, -0.25), (9, float("-inf"))), 1, 2),
)
RICH = ChoiceDelta(
    0,
    "ab",
    [SECOND],
    "tool_calls",
    [ParsedCall(0, "f", "{}")],
    [97, 98],
    [97, 98],
    [FIRST, SECOND],
    "so",
)
PLAIN = ChoiceDelta(1, "", finish="stop")


def closed(schema: Json) -> Json:
    """The schema without room for properties that it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if "required" in found:
        found["additionalProperties"] = False
    return found


def token_bytes(token: int) -> bytes:
    return bytes([token])


@pytest.mark.parametrize("pieces", [[RICH], [PLAIN], [RICH, PLAIN]])
@pytest.mark.parametrize("kind", [ChatRenderer, CompletionRenderer])
def test_an_answer_holds_only_what_is_described(
    kind: type[ChatRenderer | CompletionRenderer], pieces: list[ChoiceDelta]
) -> None:
    head = ResponseHead("id-1", 123, "tiny", include_usage=True, token_ids=RICH in pieces)
    answer = json.loads(kind(head, token_bytes, RICH in pieces).whole(pieces, USAGE))
    name = "ChatCompletion" if kind is ChatRenderer else "Completion"
    strict = jsonschema.Draft202012Validator(closed(COMPONENTS[name]))
    strict.validate(answer)
    with pytest.raises(jsonschema.ValidationError):
        strict.validate({**answer, "more": 1})


@pytest.mark.parametrize("piece", [RICH, PLAIN])
@pytest.mark.parametrize("usage", [USAGE, None])
@pytest.mark.parametrize("kind", [ChatRenderer, CompletionRenderer])
def test_a_chunk_holds_only_what_is_described(
    kind: type[ChatRenderer | CompletionRenderer], usage: Usage | None, piece: ChoiceDelta
) -> None:
    head = ResponseHead("id-1", 123, "tiny", include_usage=usage is not None, token_ids=True)
    made = kind(head, token_bytes, True)
    bodies = [made.opening(piece, usage), *made.chunks(piece, usage), made.usage_chunk(USAGE)]
    name = "ChatCompletionChunk" if kind is ChatRenderer else "CompletionChunk"
    strict = jsonschema.Draft202012Validator(closed(COMPONENTS[name]))
    for body in bodies:
        if body is not None:
            strict.validate(json.loads(body))


def test_a_refusal_holds_only_what_is_described() -> None:
    body = error_body(InvalidRequest("give a number", "n"))
    jsonschema.Draft202012Validator(closed(COMPONENTS["Error"])).validate(body)
