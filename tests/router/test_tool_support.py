"""What templates do with tools is found by trying: forms, arguments, ids, and what they ignore."""

from __future__ import annotations

import pytest

from baton.models.training import tiny_tokenizer
from baton.router.templates.chat_template import ChatTemplate
from baton.router.templates.tool_support import ToolSupport, support_of
from baton.router.text.call_forms import FORMS
from tests.support.json_values import JsonObject

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call_12", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
    ],
}
ANSWERED = {"role": "tool", "content": "4", "tool_call_id": "call_12"}


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
def test_the_form_is_the_one_that_the_template_prints(
    tool_templates: dict[str, str], name: str
) -> None:
    support = support_of(ChatTemplate(tool_templates[name], SPECIAL))
    assert support == ToolSupport(
        tools=True, calls=True, calls_alone=True, short_ids=name == "mistral", form=FORMS[name]
    )


def test_our_own_model() -> None:
    tiny = support_of(ChatTemplate(tiny_tokenizer.CHAT_TEMPLATE, {}))
    assert tiny == ToolSupport(tools=True, calls=True, calls_alone=True, form=FORMS["hermes"])


def test_a_form_that_is_not_known(tool_templates: dict[str, str]) -> None:
    support = support_of(ChatTemplate(tool_templates["text"], {}))
    assert support == ToolSupport(tools=True, calls=True, calls_alone=True, text_arguments=True)
    markup = tool_templates["hermes"].replace('{"name": "', "<function=").replace('", "arg', "<arg")
    support = support_of(ChatTemplate(markup, {}))
    assert support.tools and support.calls and support.form is None


@pytest.mark.parametrize(
    ("source", "tools", "calls"),
    [
        (PLAIN, False, False),
        ("{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN, True, False),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + PLAIN, False, False),
        (
            "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
            "{{ raise_exception('unknown role') }}{% endif %}{% endfor %}" + PLAIN,
            False,
            False,
        ),
    ],
)
def test_what_is_ignored_is_not_supported(source: str, tools: bool, calls: bool) -> None:
    support = support_of(ChatTemplate(source, {}))
    assert (support.tools, support.calls, support.calls_alone) == (tools, calls, calls)
    assert support.form is None


def test_without_a_template_nothing_is() -> None:
    assert support_of(None) == ToolSupport()


def test_a_template_of_its_own_for_tools(tool_templates: dict[str, str]) -> None:
    support = support_of(ChatTemplate(PLAIN, {}, with_tools=tool_templates["hermes"]))
    assert (support.tools, support.calls, support.calls_alone) == (True, True, False)
    assert support.form == FORMS["hermes"]


def test_messages_are_made_to_suit() -> None:
    both: list[JsonObject] = [CALLED, ANSWERED]
    assert ToolSupport().adapted(both) == both
    (called, answered) = ToolSupport(text_arguments=True, short_ids=True).adapted(both)
    (call,) = called["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a":[1]}'}
    assert call["id"] == answered["tool_call_id"]
    assert len(call["id"]) == 9 and call["id"].isalnum()
    assert both == [CALLED, ANSWERED] and CALLED["tool_calls"][0]["id"] == "call_12"
    function = {"name": "f", "arguments": {"é": [1 << 64, 1.5]}}
    wide = {**CALLED, "tool_calls": [{"id": "call_12", "type": "function", "function": function}]}
    (called,) = ToolSupport(text_arguments=True).adapted([wide])
    printed = called["tool_calls"][0]["function"]["arguments"]
    assert printed == '{"é":[18446744073709551616,1.5]}'
    kept = ToolSupport(short_ids=True).adapted([{**ANSWERED, "tool_call_id": "abcDEF012"}])
    assert kept[0]["tool_call_id"] == "abcDEF012"
    other = ToolSupport(short_ids=True).adapted([{**ANSWERED, "tool_call_id": "call_13"}])
    assert other[0]["tool_call_id"] != call["id"]
