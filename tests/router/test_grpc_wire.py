"""Messages of very many fields are refused before protobuf makes objects of them; others are read
as protobuf reads them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from baton.proto import client_pb2
from baton.router.grpc_frontend import wire as grpc_wire
from baton.router.grpc_frontend.wire import MAX_FIELDS, message_of
from baton.runtime.errors import InvalidRequest

Generate = client_pb2.GenerateRequest
LONG = b"\x3a\x03abc"  # of `stop`
MANY = MAX_FIELDS + 1


def nested(number: int, inner: bytes) -> bytes:
    """A field of that number, with these bytes in it."""
    length, left = b"", len(inner)
    while left >= 0x80:
        length, left = length + bytes([left & 0x7F | 0x80]), left >> 7
    return bytes([number << 3 | 2]) + length + bytes([left]) + inner


@pytest.mark.parametrize(
    "sent",
    [
        b"\x22\x00" * MANY,  # messages
        b"\x3a\x00" * MANY,  # stop
        b"\x18\x07" * MANY,  # prompt_tokens, not packed
        b"\xf8\x07\x01" * MANY,  # no field that is known
        b"\x61" + b"\x01" * 8 + b"\x7d" + b"\x01" * 4 + b"\x22\x00" * MANY,  # after fixed ones
        nested(4, b"\x22\x00" * MANY),  # calls of one message
        nested(4, nested(4, b"\x1a\x00" * MANY)),  # functions of one call
    ],
    ids=["messages", "texts", "numbers", "unknown", "fixed", "calls", "deep"],
)
def test_very_many_fields_are_refused_unread(sent: bytes) -> None:
    def unexpected(_: bytes) -> None:
        raise AssertionError("read")

    shape: Any = type("Shape", (), {"DESCRIPTOR": Generate.DESCRIPTOR, "FromString": unexpected})
    with pytest.raises(InvalidRequest, match=f"over {MAX_FIELDS} fields"):
        message_of(sent, shape)


def test_as_many_fields_as_are_read_are_read() -> None:
    sent = LONG * MAX_FIELDS
    assert len(message_of(sent, Generate).stop) == MAX_FIELDS
    tokens = Generate(prompt_tokens=[7] * (4 * MAX_FIELDS))  # packed: one field
    assert message_of(tokens.SerializeToString(), Generate) == tokens
    text = Generate(prompt="\x22\x00" * MANY)
    assert message_of(text.SerializeToString(), Generate) == text


def test_what_is_cut_off_is_no_message() -> None:
    whole = LONG * (MAX_FIELDS - 10)
    assert message_of(whole, Generate).stop
    for sent in (
        whole[:-1],
        whole + b"\x22",  # no length
        whole + b"\x22\x05abc",
        whole + b"\x22" + b"\xff" * 11,  # a number without end
        whole + b"\x23",  # a group
        nested(4, whole)[:-1],
        nested(4, nested(4, whole)[:-1]),
    ):
        with pytest.raises(InvalidRequest, match="the message is no GenerateRequest"):
            message_of(sent, Generate)


CALLS = st.builds(
    client_pb2.ToolCall,
    id=st.text(max_size=3),
    function=st.builds(client_pb2.FunctionCall, arguments=st.text(max_size=200)),
)
MESSAGES = st.builds(
    client_pb2.Message,
    role=st.text(max_size=9),
    content=st.text(max_size=200),
    tool_calls=st.lists(CALLS, max_size=3),
)
REQUESTS = st.builds(
    Generate,
    prompt_tokens=st.lists(st.integers(0, (1 << 32) - 1), max_size=9),
    messages=st.lists(MESSAGES, max_size=3),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    temperature=st.floats(allow_nan=False),
    stop=st.lists(st.text(max_size=300), max_size=3),
    logit_bias=st.dictionaries(st.integers(0, 1 << 20), st.floats(-1, 1), max_size=3),
)


@given(REQUESTS)
def test_what_clients_write_is_counted_to_its_end(sent: client_pb2.GenerateRequest) -> None:
    grpc_wire.check_fields(sent.SerializeToString(), Generate.DESCRIPTOR)


@given(REQUESTS, st.integers(0, 400), st.binary(max_size=9))
def test_whatever_comes_is_counted_or_refused(
    sent: client_pb2.GenerateRequest, at: int, noise: bytes
) -> None:
    raw = sent.SerializeToString()
    with suppress(DecodeError, IndexError, InvalidRequest):
        grpc_wire.check_fields(raw[:at] + noise + raw[at:], Generate.DESCRIPTOR)
