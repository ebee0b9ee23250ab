"""Chats of many kinds through templates like those of known families, against transformers.

The templates in families/ are our own words; the constructs are those of the public ones: what is
set in which scope, what counts as iterable, how numbers and objects are printed, what is trimmed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.router.templates.chat_template import ChatTemplate
from baton.runtime.errors import InvalidRequest
from tests.support.json_values import Json, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FAMILIES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "families").glob("*.jinja"))
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
Message = JsonObject


def call(name: str, arguments: Message, number: int = 0) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def tool(name: str, properties: Message, **more: Json) -> Message:
    parameters = {"type": "object", "properties": properties, "required": [*properties][:1]}
    function = {"name": name, "description": f"Does {name} & <more>, é", "parameters": parameters}
    return {"type": "function", "function": {**function, **more}}


USER: Message = {"role": "user", "content": "  Wie spät ist es?\n"}
SYSTEM: Message = {"role": "system", "content": "Be <b>brief</b> & kind. "}
THOUGHT = "<think>\nlet me see\n</think>\n\nIt is 5 o'clock."
ANSWER: Message = {"role": "assistant", "content": THOUGHT}
CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call("clock", {"zone": "Europe/Zürich <&>", "exact": True})],
}
CALLING_TWICE: Message = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [
        call("clock", {"zone": None, "days": [1, 2.5, {"a": "b"}]}, 1),
        call("weather_of", {}, 2),
    ],
}
WHY = "He asks\nfor it. "
REASONED: Message = {"thinking": WHY, **CALLING, "reasoning_content": WHY}  # by both names
RESULT: Message = {"role": "tool", "content": '{"now": "17:00"}', "tool_call_id": "call00000"}
RESULTS: list[Message] = [
    {"role": "tool", "content": "17", "name": "clock", "tool_call_id": "call00001"},
    {"role": "tool", "content": "rain", "tool_call_id": "call00002"},
]
TOOLS = [
    tool("clock", {"zone": {"type": "string", "enum": ["a", "b"]}, "exact": {"type": "boolean"}}),
    tool(
        "weather_of",
        {
            "days": {"type": "array", "items": {"type": "integer"}, "description": "which"},
            "where": {"type": ["string", "null"], "default": None},
            "size": {"type": "object", "properties": {"w": {"type": "number"}}},
        },
        strict=False,
    ),
    tool("nothing", {}),
]
CHATS: dict[str, list[Message]] = {
    "user": [USER],
    "empty": [{"role": "user", "content": ""}],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "Sicher?"}],
    "system_turns": [SYSTEM, USER, ANSWER, USER, ANSWER],
    "call": [USER, CALLING],
    "result": [SYSTEM, USER, CALLING, RESULT],
    "reasoning": [USER, REASONED, RESULT],
    "calls": [USER, CALLING, RESULT, ANSWER, USER, CALLING_TWICE, *RESULTS],
    "all": [SYSTEM, USER, CALLING_TWICE, *RESULTS, ANSWER, {**USER, "name": "Ann"}],
}
VARIABLES: list[Message] = [{}, {"enable_thinking": False, "reasoning_effort": "high"}]


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> PreTrainedTokenizerFast:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(model_folder / "tokenizer.json"), **SPECIAL
    )


def rendered(render: Callable[[], object]) -> str | None:
    """What a chat becomes; None where the template cannot take it."""
    try:
        text = render()
    except Exception as error:
        # each of the two implementations raises classes of its own
        assert not isinstance(error, AssertionError)
        return None
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_family_renders_as_in_transformers(reference: PreTrainedTokenizerFast, family: str) -> None:
    template = ChatTemplate(FAMILIES[family], SPECIAL)
    taken = 0
    for chat in CHATS.values():
        for tools in (None, TOOLS):
            for variables in VARIABLES:
                expected = rendered(
                    partial(
                        reference.apply_chat_template,
                        chat,
                        tools=tools,
                        chat_template=FAMILIES[family],
                        tokenize=False,
                        add_generation_prompt=True,
                        **variables,
                    )
                )
                if expected is None:
                    with pytest.raises(InvalidRequest):
                        template.render(chat, tools, variables=variables)
                else:
                    assert template.render(chat, tools, variables=variables) == expected
                    taken += 1
    assert taken >= 4  # each family takes the plain chats at least


def test_families_are_many() -> None:
    assert len(FAMILIES) >= 40
