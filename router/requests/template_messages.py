"""Messages and tools of a chat in the form that chat templates require.

Text parts are joined, missing fields are left out, the arguments of a call and the parameters of a
function are objects. Knows no template. Stateless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from baton.router.requests.openai_schema import Message, Tool, ToolCall
from baton.runtime.errors import InvalidRequest

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}  # templates expect these


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert the messages. Raises InvalidRequest for a message without content, calls in a
    message that is not an assistant's, and a tool's message that answers no earlier call."""
    called: set[str] = set()
    plain = []
    for place, message in enumerate(messages):
        field = f"messages[{place}]"
        made: dict[str, Any] = {"role": message.role, "content": _content(message, field)}
        if message.name is not None:
            made["name"] = message.name
        if message.tool_calls:
            if message.role != "assistant":
                raise InvalidRequest(
                    f"{field}.tool_calls: only an assistant calls, leave it out",
                    f"{field}.tool_calls",
                )
            made["tool_calls"] = [_call(call) for call in message.tool_calls]
            called.update(call.id for call in message.tool_calls)
        if message.tool_call_id is not None:
            made["tool_call_id"] = message.tool_call_id
        if message.role == "tool":
            _check_answer(message.tool_call_id, called, f"{field}.tool_call_id")
        plain.append(made)
    return plain


def _content(message: Message, field: str) -> str | None:
    if isinstance(message.content, list):
        return "\n".join(part.text for part in message.content)
    if message.content is not None:
        return message.content
    if message.role == "assistant" and message.tool_calls:
        return None
    raise InvalidRequest(f"{field}.content is missing: add a text", f"{field}.content")


def _check_answer(answered: str | None, called: set[str], field: str) -> None:
    if answered is None:
        raise InvalidRequest(f"{field} is missing: add the id of the call it answers", field)
    if answered not in called:
        raise InvalidRequest(
            f"{field}: no assistant's message before has a call {answered[:40]!r} in its "
            "tool_calls: send that message too",
            field,
        )


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    function = {
        "name": call.function.name,
        "arguments": orjson.loads(arguments) if arguments.strip() else {},
    }
    return {"id": call.id, "type": "function", "function": function}


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Convert the tools. Raises InvalidRequest for two tools of one name."""
    plain = []
    names: set[str] = set()
    for place, tool in enumerate(tools):
        field = f"tools[{place}].function"
        given = tool.function
        if given.name in names:
            raise InvalidRequest(
                f"{field}.name: there are two tools {given.name!r}, rename one", f"{field}.name"
            )
        names.add(given.name)
        function: dict[str, Any] = {"name": given.name}
        if given.description is not None:
            function["description"] = given.description
        function["parameters"] = _NO_PARAMETERS if given.parameters is None else given.parameters
        plain.append({"type": "function", "function": function})
    return plain
