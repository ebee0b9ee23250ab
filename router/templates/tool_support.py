"""What a model's chat template does with tools: found by showing it some, and reading it back.

    one tool              is its name in the prompt?
    a call and its result are they in the prompt, with arguments as an object or as a text?
    a call alone          is a missing content null, absent or empty to it?
    that call's text      which form of `tool_calls.py` reads the same call back?

So no list of models is kept: whoever prints calls in a known form is known. Knows no requests.
Stateless; asked once for each model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import product
from typing import Any, Literal, get_args

import orjson

from baton.router.templates.chat_template import ChatTemplate
from baton.router.text.tool_calls import FORMS, Calling, CallParser, Form
from baton.runtime.errors import InvalidRequest

NoContent = Literal["null", "absent", "empty"]
_NO_CONTENT: tuple[NoContent, ...] = get_args(NoContent)
_NAME, _TOLD = "look_up_probe", "what the probe told"
_ARGUMENTS = {"probe_key": "probe value"}
_ID = "call_" + "0" * 32  # as ours are
_SHORT_LENGTH = 9  # letters and digits: all that the templates of Mistral take
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
_ANSWERED = {"role": "tool", "content": _TOLD, "tool_call_id": _ID}


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """`tools` are printed in the prompt; `calls` and their results are, beside tools, and
    `calls_alone` without. `text_arguments`: the template wants a text where others want an
    object. `short_ids`: it refuses ids of another length than 9. `no_content`: what it takes for
    the content of a message that is calls alone. `form` is None where calls are printed in a form
    that is not known."""

    tools: bool = False
    calls: bool = False
    calls_alone: bool = False
    text_arguments: bool = False
    short_ids: bool = False
    no_content: NoContent = "null"
    form: Form | None = None

    def suited(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with arguments, ids and missing contents as the template wants
        them."""
        return [self._suited(message) for message in messages]

    def _suited(self, message: dict[str, Any]) -> dict[str, Any]:
        suited = dict(message)
        if message["content"] is None and self.no_content == "absent":
            del suited["content"]
        elif message["content"] is None and self.no_content == "empty":
            suited["content"] = ""
        if "tool_call_id" in message:
            suited["tool_call_id"] = self._id(message["tool_call_id"])
        if "tool_calls" in message:
            suited["tool_calls"] = [
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
        return suited

    def _id(self, given: str) -> str:
        if not self.short_ids or (len(given) == _SHORT_LENGTH and given.isalnum()):
            return given
        return blake2b(given.encode(), digest_size=16).hexdigest()[:_SHORT_LENGTH]

    def _arguments(self, given: dict[str, Any]) -> dict[str, Any] | str:
        return orjson.dumps(given).decode() if self.text_arguments else given


def support_of(template: ChatTemplate | None) -> ToolSupport:
    """What this template does; without one, nothing."""
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
            return replace(support, calls=beside, calls_alone=alone, form=form)
    return ToolSupport(tools)


def _prints_calls(template: ChatTemplate, support: ToolSupport, tools: Any) -> bool:
    """Whether a call and its result are in the prompt, and no "None" for the missing content."""
    asked = _render(template, [_ASKED], tools) or ""
    text = _render(template, support.suited([_ASKED, _CALLED, _ANSWERED]), tools)
    return (
        text is not None
        and all(value in text for value in (_TOLD, *_ARGUMENTS.values()))
        and text.count("None") <= asked.count("None")
    )


def _form(template: ChatTemplate, support: ToolSupport, prompt: str | None) -> Form | None:
    """The form in which a model that answers `prompt` is expected to write a call."""
    text = _render(template, support.suited([_ASKED, _CALLED]), [_TOOL], answer=False) or ""
    answer = text.removeprefix(prompt or "")
    for form in FORMS.values():
        parser = CallParser(Calling(form, frozenset({_NAME})))
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
