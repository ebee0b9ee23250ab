"""Turns bytes into a gRPC message; a message with too many fields is refused before it is parsed.

Creating an object for each field takes far longer than skipping it, and blocks the event loop. So
the fields of a long message, also nested ones, are counted first: tag by tag, by the protobuf
encoding (https://protobuf.dev/programming-guides/encoding). Knows no field's meaning. Stateless.
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from baton.runtime.errors import InvalidRequest

MAX_FIELDS = 1 << 15  # a list of packed numbers counts as one
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types; no message has groups (3, 4)
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10
_Message = TypeVar("_Message", bound=Message)


def message_of(sent: bytes, message_type: type[_Message]) -> _Message:
    """Parse the message. Raises InvalidRequest if that fails, or for over MAX_FIELDS fields."""
    try:
        if len(sent) > 2 * MAX_FIELDS:  # a field takes two bytes at least
            check_fields(sent, cast(Descriptor, message_type.DESCRIPTOR))
        return message_type.FromString(sent)
    except (DecodeError, IndexError) as error:
        raise InvalidRequest(
            f"the message is no {message_type.DESCRIPTOR.name}: send one"
        ) from error


def check_fields(sent: bytes, descriptor: Descriptor) -> None:
    """Raise InvalidRequest for too many fields, IndexError or DecodeError for bytes that are cut
    off or no message."""
    left = MAX_FIELDS
    inside = [(0, len(sent), _messages(descriptor))]
    while inside:
        at, end, messages = inside.pop()
        while at < end:
            left -= 1
            if left < 0:
                raise InvalidRequest(f"the message has over {MAX_FIELDS} fields: send fewer")
            tag, at = _varint(sent, at)
            wire_type = tag & 7
            if wire_type == _BYTES:
                length, at = _varint(sent, at)
                nested = messages.get(tag >> 3)
                if nested is not None and length:
                    inside.append((at, at + length, _messages(nested)))
                at += length
            elif wire_type == _VARINT:
                _, at = _varint(sent, at)
            else:
                at += _FIXED.get(wire_type, len(sent) + 1)
        if at > end:
            raise DecodeError("cut off")


def _varint(sent: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position behind it."""
    byte = sent[at]
    if byte < 0x80:
        return byte, at + 1
    number = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = sent[at + index]
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, at + index + 1
    raise DecodeError("a number has no end")


@cache  # for each type of message
def _messages(descriptor: Descriptor) -> dict[int, Descriptor]:
    """Return the fields that are messages, by number."""
    return {
        field.number: field.message_type
        for field in descriptor.fields
        if field.message_type is not None
    }
