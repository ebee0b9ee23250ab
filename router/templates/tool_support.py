"""How a model's chat template handles tools: found by rendering some and reading the result.

    one tool              is its name in the prompt?
    a call and its result are they in the prompt, with arguments as an object or as a text?
    a call alone          is a missing content null, absent or empty to it?
    a call with reasoning is it in the prompt if its name is `thinking`?
    that call's text      which form of `tool_calls.py` reads the same call back?

So there is no list of models: a template that prints calls in a known form is supported. Knows no
requests. Stateless; called once for each model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import product
from typing import Any, Literal, get_args

import orjson

from baton.router.templates.chat_template import ChatTemplate
from baton.router.text.call_form import CallableTools, CallForm
from baton.router.text.call_forms import FORMS
from baton.router.text.tool_calls import ToolCallParser
from baton.runtime.errors import InvalidRequest

NoContent = Literal["null", "absent", "empty"]
_NO_CONTENT: tuple[NoContent, ...] = get_args(NoContent)
Thinking = Literal["unread", "alone", "beside_content"]
_NAME, _RESULT = "look_up_probe", "the result of the probe"
_ARGUMENTS = {"probe_key": "probe value"}
_ID = "call_" + "0" * 32  # the form of our own ids
_SHORT_LENGTH = 9  # letters and digits: Mistral's templates require it
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "What to look up."}},
            "required": ["probe_key"],
        },
    },
}
_ASKED = {"role": "user", "content": "Hello"}
_CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    ],
}
_BESIDE, _THOUGHT = "the probe looks it up", "the probe thinks"
_ANSWERED = {"role": "tool", "content": _RESULT, "tool_call_id": _ID}


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """`tools`: the template prints tools; `calls`: also calls and their results, with tools, and
    `calls_alone` without. `text_arguments`: it requires arguments as text, not as an object.
    `short_ids`: it refuses ids that have not 9 characters. `no_content`: the content that it
    accepts for a message of calls only. `thinking`: it prints the reasoning before a call by this
    name; if `alone`, only in a message without content. `form` is None if it prints calls in an
    unknown form."""

    tools: bool = False
    calls: bool = False
    calls_alone: bool = False
    text_arguments: bool = False
    short_ids: bool = False
    no_content: NoContent = "null"
    thinking: Thinking = "unread"
    form: CallForm | None = None

    def adapted(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with arguments, ids, missing contents and reasoning as the template
        requires them."""
        return [self._adapted(message) for message in messages]

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        adapted = dict(message)
        if message["content"] is None and self.no_content == "absent":
            del adapted["content"]
        elif message["content"] is None and self.no_content == "empty":
            adapted["content"] = ""
        if "reasoning_content" in message and self._prints_thinking(message):
            adapted["thinking"] = message["reasoning_content"]
        if "tool_call_id" in message:
            adapted["tool_call_id"] = self._id(message["tool_call_id"])
        if "tool_calls" in message:
            adapted["tool_calls"] = [
                {
                    **call,
                    "id": self._id(call["id"]),
                    "function": {
                        **call["function"],
                        "arguments": self._arguments(call["function"]["arguments"]),
                    },
                }
                for call in message["tool_calls"]
            ]
        return adapted

    def _prints_thinking(self, message: dict[str, Any]) -> bool:
        alone = self.thinking == "alone" and not message["content"]
        return alone or self.thinking == "beside_content"

    def _id(self, given: str) -> str:
        if not self.short_ids or (len(given) == _SHORT_LENGTH and given.isalnum()):
            return given
        return blake2b(given.encode(), digest_size=16).hexdigest()[:_SHORT_LENGTH]

    def _arguments(self, given: dict[str, Any]) -> dict[str, Any] | str:
        if not self.text_arguments:
            return given
        return json.dumps(given, ensure_ascii=False, separators=(",", ":"))


def support_of(template: ChatTemplate | None) -> ToolSupport:
    """Return what this template supports; without one, nothing."""
    if template is None:
        return ToolSupport()
    prompt = _render(template, [_ASKED], [_TOOL])
    tools = prompt is not None and _NAME in prompt
    for text, short, content in product((False, True), (False, True), _NO_CONTENT):
        support = ToolSupport(tools, True, True, text, short, content)
        beside = _prints_calls(template, support, [_TOOL])
        alone = _prints_calls(template, support, None)
        if beside or alone:
            form = _form(template, support, prompt) if tools else None
            thinking = _thinking(template, support, [_TOOL] if beside else None)
            found = replace(support, calls=beside, calls_alone=alone)
            return replace(found, thinking=thinking, form=form)
    return ToolSupport(tools)


def _prints_calls(template: ChatTemplate, support: ToolSupport, tools: Any) -> bool:
    """Return whether a call and its result are in the prompt, without "None" as content."""
    asked = _render(template, [_ASKED], tools) or ""
    text = _render(template, support.adapted([_ASKED, _CALLED, _ANSWERED]), tools)
    return (
        text is not None
        and all(value in text for value in (_RESULT, *_ARGUMENTS.values()))
        and text.count("None") <= asked.count("None")
    )


def _thinking(template: ChatTemplate, support: ToolSupport, tools: Any) -> Thinking:
    """Return whether the prompt has the reasoning of a call's message as its `thinking`: alone, and
    beside a content, which gpt-oss's template refuses."""
    alone, beside = (
        _THOUGHT in (_render(template, support.adapted([_ASKED, called, _ANSWERED]), tools) or "")
        for called in (
            {**_CALLED, "thinking": _THOUGHT},
            {**_CALLED, "thinking": _THOUGHT, "content": _BESIDE},
        )
    )
    if not alone:
        return "unread"
    return "beside_content" if beside else "alone"


def _form(template: ChatTemplate, support: ToolSupport, prompt: str | None) -> CallForm | None:
    """Return the form in which a model that answers `prompt` is expected to write a call."""
    text = _render(template, support.adapted([_ASKED, _CALLED]), [_TOOL], answer=False) or ""
    answer = text.removeprefix(prompt or "")
    for form in FORMS.values():
        parser = ToolCallParser(CallableTools(form, frozenset({_NAME})))
        calls = parser.push(answer)[1] + parser.flush()[1]
        if [orjson.loads(call.arguments) for call in calls] == [_ARGUMENTS]:
            return form
    return None


def _render(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, answer: bool = True
) -> str | None:
    try:
        return template.render(messages, tools, answer)
    except InvalidRequest:
        return None
