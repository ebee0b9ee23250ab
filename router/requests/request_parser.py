"""Parses a body into the request model of its route, or names the first bad field.

Values are counted before they are parsed: the event loop waits for each of these steps, so a body
that would block it for long is refused while it is still bytes. The bounds keep a step under about
100 ms (docs/reliability/lab.md). Knows no model. Stateless.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from baton.router.requests.schema_body import UNSUPPORTED, Body
from baton.runtime.errors import InvalidRequest

MAX_PATH_CHARS = 200  # of a field, in an error
MAX_STRINGS = 1 << 16  # of a body, the names of fields too
MAX_CONTAINERS = 1 << 15  # lists and objects: each costs more than a number does
MAX_ARGUMENT_VALUES = 1 << 15  # commas and brackets in all arguments of calls
SLICE_BYTES = 1 << 20  # of a body, counted at once
MAX_PARTS_AND_CALLS = 4096  # parts of contents, and calls, of all messages together
BodyT = TypeVar("BodyT", bound=Body)


def check_counts(max_values: int, *texts: bytes) -> None:
    """Refuse JSON with so many values (commas, strings, containers) that parsing it would delay
    other requests. The content of its strings does not count."""
    for _ in count_steps(max_values, *texts):
        pass


def count_steps(max_values: int, *texts: bytes) -> Iterator[None]:
    """Same as `check_counts`, in steps of a few milliseconds each."""
    values = sum(text.count(b",") for text in texts)
    strings = sum(text.count(b'"') for text in texts) // 2
    containers = sum(text.count(b"[") + text.count(b"{") for text in texts)
    if values <= max_values and strings <= MAX_STRINGS and containers <= MAX_CONTAINERS:
        return
    quotes = values = containers = 0
    for text in texts:
        inside = False
        for bare in _without_escapes(text):
            yield
            quotes += bare.count(b'"')
            if quotes // 2 > MAX_STRINGS:
                raise InvalidRequest(f"the body holds over {MAX_STRINGS} strings: send fewer")
            parts = bare.split(b'"')
            outside = b"".join(parts[inside::2])
            inside ^= len(parts) % 2 == 0
            values += outside.count(b",")
            containers += outside.count(b"[") + outside.count(b"{")
    if values > max_values:
        raise InvalidRequest(f"the body holds over {max_values} values: send fewer")
    if containers > MAX_CONTAINERS:
        raise InvalidRequest(
            f"the body holds {containers} lists and objects, at most {MAX_CONTAINERS} are read"
        )


def _without_escapes(text: bytes) -> Iterator[bytes]:
    """Yield slices of the text without escaped quotes: each quote left begins or ends a string."""
    left = b""  # a backslash that may escape what the next slice begins with
    for start in range(0, len(text), SLICE_BYTES):
        part = left + text[start : start + SLICE_BYTES]
        odd = (len(part) - len(part.rstrip(b"\\"))) % 2
        left = part[len(part) - odd :]
        yield part[: len(part) - odd].replace(b"\\\\", b"").replace(b'\\"', b"")


def decode_body(body: bytes) -> dict[str, Any]:
    """Return the body's fields, for `parse_fields`, once they are counted. Raises InvalidRequest if
    the body is no JSON object."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest("the body must be a JSON object")
    return found


def parse_fields(found: dict[str, Any], shape: type[BodyT]) -> BodyT:
    """Return the fields as a request of type `shape`. Raises InvalidRequest naming the first bad
    field."""
    _check_calls(found.get("messages"))
    try:
        return shape.model_validate(found)
    except ValidationError as error:
        raise _explain(error, found) from error


def _check_calls(messages: Any) -> None:
    """Refuse very many parts and calls in messages: each costs as much as a message. Arguments of
    calls are JSON in a string, which is parsed too, so their values count, for all calls
    together."""
    parts_and_calls = values = 0
    for message in messages if isinstance(messages, list) else ():
        found = message if isinstance(message, dict) else {}
        parts, calls = found.get("content"), found.get("tool_calls")
        parts_and_calls += len(parts) if isinstance(parts, list) else 0
        parts_and_calls += len(calls) if isinstance(calls, list) else 0
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            text = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(text, str):
                values += text.count(",") + text.count("[") + text.count("{")
    for count, most, what in (
        (parts_and_calls, MAX_PARTS_AND_CALLS, "they hold over {} parts of contents and calls"),
        (values, MAX_ARGUMENT_VALUES, "the arguments of calls hold over {} values"),
    ):
        if count > most:
            raise InvalidRequest(f"messages: {what.format(most)} in all: send fewer", "messages")


def _explain(error: ValidationError, body: dict[str, Any]) -> InvalidRequest:
    """Return pydantic's first error in plain words; its union tags are not part of the path. Of the
    errors of a union, the one deepest in the body is the most specific, and a wrong value is more
    specific than a wrong type."""
    errors = [(_path(found, body), found) for found in error.errors(include_url=False)]
    first_root = errors[0][0][:1]
    path, found = max(
        (each for each in errors if each[0][:1] == first_root),
        key=lambda each: (len(each[0]), not each[1]["type"].endswith("_type")),
    )
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    field = field.removeprefix(".")
    if len(field) > MAX_PATH_CHARS:
        field = f"{field[:MAX_PATH_CHARS]}..."
    if path and not field:
        return InvalidRequest("the body has a field without a name: leave it out")
    if not field:
        return InvalidRequest(f"the body: {found['msg']}")
    if found["type"] == UNSUPPORTED:
        return InvalidRequest(f"{field} is not supported here: leave it out", field)
    if found["type"] == "missing":
        return InvalidRequest(f"{field} is missing: add it", field)
    if found["type"] == "extra_forbidden":
        return InvalidRequest(f"{field} is not a known field: leave it out", field)
    message = found["msg"].replace("Input should be", "it should be")
    return InvalidRequest(f"{field}: {message[:1].lower()}{message[1:]}", field)


def _path(error: ErrorDetails, body: Any) -> list[int | str]:
    location = error["loc"]
    if error["type"] == UNSUPPORTED:
        location = (*location, error["ctx"]["field"])
    path: list[int | str] = []
    inside: Any = body
    for index, part in enumerate(location):
        if isinstance(inside, dict) and part in inside:
            inside = inside[str(part)]
        elif isinstance(inside, list) and isinstance(part, int) and part < len(inside):
            inside = inside[part]
        elif error["type"] != "missing" or index < len(location) - 1:
            continue  # a union's tag
        path.append(part)
    return path
