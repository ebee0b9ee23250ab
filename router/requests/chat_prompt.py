"""Turns a chat request into its prompt's text, and the tools that its answer may call.

Messages and tools take the form that chat templates require: text parts are joined, missing fields
are left out, the arguments of a call and the parameters of a function are objects.
Fields that the model's template would ignore (tools, calls, their results) are refused by name.
Knows the template and how it handles tools; knows no tokens. Stateless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from baton.router.requests.loop_budget import LoopBudget
from baton.router.requests.openai_schema import ChatRequest, Message, Tool, ToolCall
from baton.router.templates.chat_template import EFFORT, ChatTemplate
from baton.router.templates.tool_support import support_of
from baton.router.text.call_arguments import read_arguments
from baton.router.text.call_form import CallableTools
from baton.router.text.call_forms import FORMS
from baton.router.text.control_tokens import ControlTokens, GuardedChat
from baton.router.text.tokenizer import Text
from baton.runtime.config import ToolCalls
from baton.runtime.errors import InvalidRequest

MAX_INLINE_WEIGHT = 512  # values and KiB of text: rendered on the event loop in milliseconds
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}  # templates expect these


class ChatPrompt:
    """The chat prompts of one model. `template` is None if it has none; `tool_calls` is a
    setting of the router."""

    def __init__(
        self,
        model: str,
        template: ChatTemplate | None,
        tool_calls: ToolCalls,
        control: ControlTokens | None = None,
    ) -> None:
        self._model = model
        self._template = template
        self._support = support_of(template)
        self._form = FORMS.get(tool_calls, self._support.form)
        self._reads_calls = tool_calls != "none"
        self._control = control

    def tools(self, request: ChatRequest) -> tuple[Sequence[Tool], CallableTools | None]:
        """Return the tools for the prompt, and those that the answer may call. Raises
        InvalidRequest if the template prints no tools, or the form of its calls is not known."""
        tools = request.tools or ()
        if self._template is None or not tools or request.tool_choice == "none":
            return (), None
        self._check_tools()
        if not self._reads_calls:
            return tools, None
        if self._form is None:
            raise InvalidRequest(
                f"tools: {self._model!r} writes calls in an unknown form: leave tools out, or "
                "have router.tool_calls set",
                "tools",
            )
        schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
        parallel = request.parallel_tool_calls is not False
        return tools, CallableTools(self._form, frozenset(schemas), parallel, schemas)

    def variables(self, request: ChatRequest, tools: Sequence[Tool]) -> Mapping[str, Any] | None:
        """Return the template's own variables for a chat whose prompt has these tools. Raises
        InvalidRequest for a reasoning_effort that the template does not read."""
        given, effort = request.chat_template_kwargs, request.reasoning_effort
        if effort is None or self._template is None:
            return given
        if not self._template.reads_effort(bool(tools)):
            raise InvalidRequest(
                f"{EFFORT}: the chat template of {self._model!r} reads no {EFFORT}: leave it out",
                EFFORT,
            )
        if given and EFFORT in given:
            raise InvalidRequest(f"{EFFORT} is in chat_template_kwargs too: give one", EFFORT)
        return {**(given or {}), EFFORT: effort}

    def plain(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
        """Return the messages in the template's form. Raises InvalidRequest, which names the field
        that the template cannot print."""
        if self._template is None:
            raise InvalidRequest(
                f"the model {self._model!r} has no chat template: use /v1/completions", "messages"
            )
        if tools:
            self._check_tools()
        plain = plain_messages(messages)
        if not (self._support.calls if tools else self._support.calls_alone):
            self._check_no_calls(plain)
        return self._support.adapted(plain)

    async def text(
        self,
        plain: Sequence[dict[str, Any]],
        tools: Sequence[Tool],
        variables: Mapping[str, Any] | None,
        turns: LoopBudget,
    ) -> Text:
        """Return the prompt for the messages that `plain` returned, open for an answer; in pieces
        if control tokens in it are text. Raises InvalidRequest if the template refuses it."""
        assert self._template is not None
        described = await turns.run(0, plain_tools, tools)
        given = GuardedChat([*plain], described, dict(variables or {}))
        long = _is_long([given.messages, given.tools, given.variables])
        if self._control is not None:
            guard = self._control.guard
            guarding = asyncio.to_thread(guard, given) if long else turns.run(0, guard, given)
            given = await guarding
        chat = (given.messages, given.tools)
        if long:
            text = await self._template.render_apart(*chat, given.variables)
        else:
            render = self._template.render
            text = await turns.run(0, render, *chat, variables=given.variables)
        if self._control is None or not given.mark:
            return text
        pieces = self._control.pieces
        if long:
            return await asyncio.to_thread(pieces, text, given.mark)
        return await turns.run(0, pieces, text, given.mark)

    def _check_tools(self) -> None:
        if not self._support.tools:
            raise InvalidRequest(
                f"tools: the chat template of {self._model!r} takes none: leave them out, or use "
                "a model that is made for tools",
                "tools",
            )

    def _check_no_calls(self, messages: Sequence[dict[str, Any]]) -> None:
        for index, message in enumerate(messages):
            if "tool_calls" in message or message["role"] == "tool":
                field = f"messages[{index}]"
                if "tool_calls" in message:
                    field += ".tool_calls"
                raise InvalidRequest(
                    f"{field}: the chat template of {self._model!r} takes no calls of tools: "
                    "leave it out, or use a model that is made for tools",
                    field,
                )


def _is_long(value: Any) -> bool:
    """Return whether rendering the value would block the event loop for too long."""
    left, layer = MAX_INLINE_WEIGHT, [value]
    while layer and left >= 0:
        each = layer.pop()
        left -= 1
        if isinstance(each, str):
            left -= len(each) >> 10
        elif isinstance(each, dict):
            layer += [*each, *each.values()]
        elif isinstance(each, list):
            layer += each
    return left < 0


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert the messages. Raises InvalidRequest for a message without content, calls or
    reasoning in a message that is not an assistant's, and a tool's message that answers no earlier
    call."""
    called: set[str] = set()
    plain = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        made: dict[str, Any] = {"role": message.role, "content": _content(message, field)}
        if message.name is not None:
            made["name"] = message.name
        if message.role != "assistant":
            _check_no_assistant(message, field)
        if reasoning := message.reasoning_content or message.reasoning:
            made["reasoning_content"] = reasoning
        if message.tool_calls:
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
        texts = [part.text for part in message.content]
        return "\n".join(filter(None, texts) if message.role == "assistant" else texts)
    if message.content is not None:
        return message.content
    if message.role == "assistant":  # servers answer null where there is no text
        return message.refusal or (None if message.tool_calls else "")
    raise InvalidRequest(f"{field}.content is missing: add a text", f"{field}.content")


def _check_no_assistant(message: Message, field: str) -> None:
    for name in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
        if getattr(message, name):
            raise InvalidRequest(
                f"{field}.{name}: only an assistant's message has it, leave it out",
                f"{field}.{name}",
            )


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
        "arguments": read_arguments(arguments) if arguments.strip() else {},
    }
    return {"id": call.id, "type": "function", "function": function}


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Convert the tools. Raises InvalidRequest for two tools of one name."""
    plain = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"tools[{index}].function"
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
