"""The attributes of exported spans as plain values."""

from __future__ import annotations

from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.json_values import Json


def span_values(span: Span) -> dict[str, Json]:
    """Return the attributes of a span by their names, Baton's own without their prefix."""
    return {each.key.removeprefix("baton."): _plain(each.value) for each in span.attributes}


def _plain(value: AnyValue) -> Json:
    if value.HasField("array_value"):
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, str(value.WhichOneof("value")))
