"""A gRPC message's bytes, as the message; those of very many fields are refused unread.

To make an object of each field takes far longer than to skip it, and the event loop waits for all
of them. So the fields of a long message are counted first, those inside others too: tag by tag,
by the protobuf encoding (https://protobuf.dev/programming-guides/encoding). Knows no field's
meaning. Stateless.
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from baton.runtime.errors import InvalidRequest

MOST_FIELDS = 1 << 15  # a list of packed numbers is one
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types; 3 and 4 are groups: nobody has any
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_LONGEST_VARINT = 10  # bytes
_Shape = TypeVar("_Shape", bound=Message)


def message_of(sent: bytes, shape: type[_Shape]) -> _Shape:
    """Raises InvalidRequest for what is no such message, or has over MOST_FIELDS fields."""
    try:
        if len(sent) > 2 * MOST_FIELDS:  # a field takes two bytes at least
            _check_fields(sent, cast(Descriptor, shape.DESCRIPTOR))
        return shape.FromString(sent)
    except (DecodeError, IndexError) as error:
        raise InvalidRequest(f"the message is no {shape.DESCRIPTOR.name}") from error


def _check_fields(sent: bytes, descriptor: Descriptor) -> None:
    """Raises InvalidRequest for too many fields, IndexError or DecodeError for what is cut off or
    no message."""
    left = MOST_FIELDS
    inside = [(0, len(sent), _messages(descriptor))]
    while inside:
        at, end, messages = inside.pop()
        while at < end:
            left -= 1
            if left < 0:
                raise InvalidRequest(f"the message has over {MOST_FIELDS} fields: send fewer")
            tag, at = _varint(sent, at)
            kind = tag & 7
            if kind == _BYTES:
                length, at = _varint(sent, at)
                nested = messages.get(tag >> 3)
                if nested is not None and length:
                    inside.append((at, at + length, _messages(nested)))
                at += length
            elif kind == _VARINT:
                _, at = _varint(sent, at)
            else:
                at += _FIXED.get(kind, len(sent) + 1)
        if at > end:
            raise DecodeError("cut off")


def _varint(sent: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and where the next thing begins."""
    byte = sent[at]
    if byte < 0x80:
        return byte, at + 1
    number = 0
    for place in range(_LONGEST_VARINT):
        byte = sent[at + place]
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return number, at + place + 1
    raise DecodeError("a number without end")


@cache  # of each kind of message
def _messages(descriptor: Descriptor) -> dict[int, Descriptor]:
    """The fields that are messages, by number."""
    return {
        field.number: field.message_type
        for field in descriptor.fields
        if field.message_type is not None
    }
