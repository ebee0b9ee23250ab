"""From a chat request to its prompt, through templates like those of known families: variables,
missing contents and parameters, long chats."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from baton.router.requests.chat_prompt import ChatPrompt
from baton.router.requests.loop_budget import LoopBudget
from baton.router.requests.openai_schema import RESERVED_VARIABLES, ChatRequest
from baton.router.requests.request_parser import decode_body, parse_fields
from baton.router.templates.chat_template import ChatTemplate
from baton.router.templates.template_sandbox import TemplateEnvironment
from baton.runtime.errors import InvalidRequest
from tests.support.json_values import Json

FAMILIES = Path(__file__).parent / "families"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ASKED = {"role": "user", "content": "hi"}
FUNCTION = {"name": "look_up", "arguments": '{"key": "value 7"}'}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "abcdef012", "type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "content": "found it", "tool_call_id": "abcdef012"}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up."}}
WITH_CALLS = [
    *("qwen2_5", "qwen3", "qwen3_coder", "llama3_1", "mistral_v3", "mistral_small"),
    *("mistral_nemo", "deepseek_v3_1", "nemotron_nano", "nemotron_3", "hermes_2_pro", "glm4"),
    *("glm4_5", "gpt_oss", "kimi_k2", "jamba", "command_r_tools", "command_r7b"),
]


def source(family: str) -> str:
    return (FAMILIES / f"{family}.jinja").read_text(encoding="utf-8")


def request(**fields: Json) -> ChatRequest:
    return parse_fields(
        decode_body(orjson.dumps({"model": "m", "messages": [ASKED], **fields})), ChatRequest
    )


async def prompt_of(template: str, **fields: Json) -> str:
    prompt, asked = ChatPrompt("m", ChatTemplate(template, SPECIAL), "none"), request(**fields)
    tools, _ = prompt.tools(asked)
    plain = prompt.plain(asked.messages, tools)
    return await prompt.text(plain, tools, prompt.variables(asked, tools), LoopBudget())


@pytest.mark.parametrize("family", WITH_CALLS)
async def test_null_content_and_no_parameters_reach_each_family(family: str) -> None:
    text = await prompt_of(source(family), messages=[ASKED, CALLED, RESULT], tools=[TOOL])
    plain = await prompt_of(source(family), tools=[TOOL])
    assert "value 7" in text and "found it" in text and "look_up" in plain
    assert text.count("None") == plain.count("None")


@pytest.mark.parametrize(
    ("content", "printed"),
    [
        ("{{ 'null' if m.content is none else m.content }}", "null"),
        ("{{ m.content }}", ""),  # "None" would be printed
        ("{% if m.content is none %}null{% endif %}{{ m.content or '' }}", "null"),
        ("{% if m.content is defined %}{{ m.content.strip() }}{% endif %}", ""),
        ("{{ m.content.strip() }}{{ 1 + m.content | length }}", "1"),
    ],
)
async def test_null_content_is_what_the_template_can_print(content: str, printed: str) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}" + content + "|"
        "{% for call in m.tool_calls %}{{ call | tojson }}{% endfor %}{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}{{ tools | tojson }}"
    )
    text = await prompt_of(template, messages=[ASKED, CALLED, RESULT], tools=[TOOL])
    assert f"<assistant>{printed}|" in text


@pytest.mark.parametrize(
    ("family", "printed"),
    [
        ("qwen3", "<think>\n{}\n</think>\n\n<tool_call>"),
        ("nemotron_3", "<think>\n{}\n</think>\n"),
        ("gpt_oss", "<|channel|>analysis<|message|>{}<|end|>"),
    ],
)
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_reasoning_before_a_call_reaches_the_template(
    family: str, printed: str, name: str
) -> None:
    called = {**CALLED, name: "I look it up."}
    text = await prompt_of(source(family), messages=[ASKED, called, RESULT], tools=[TOOL])
    assert printed.format("I look it up.") in text
    silent = await prompt_of(
        source(family), messages=[ASKED, {**CALLED, name: ""}, RESULT], tools=[TOOL]
    )
    assert silent == await prompt_of(source(family), messages=[ASKED, CALLED, RESULT], tools=[TOOL])


async def test_reasoning_beside_a_content_is_never_refused() -> None:
    """gpt-oss's template takes one of both before a call: the content stays."""
    called = {**CALLED, "content": "Let me see.", "reasoning_content": "I look it up."}
    for family in WITH_CALLS:
        text = await prompt_of(source(family), messages=[ASKED, called, RESULT], tools=[TOOL])
        assert "found it" in text
        assert family != "gpt_oss" or "<|message|>Let me see.<|end|>" in text


async def test_variables_reach_the_template() -> None:
    assert "<think>" not in await prompt_of(source("qwen3"))
    off = await prompt_of(source("qwen3"), chat_template_kwargs={"enable_thinking": False})
    assert off.endswith("<think>\n\n</think>\n\n")
    nested = {"budget": {"steps": [1, 2]}, "documents": [{"text": "a"}]}
    printed = "{{ budget.steps[1] }}{{ documents[0].text }}"
    assert await prompt_of(printed, chat_template_kwargs=nested) == "2a"


async def test_reasoning_effort_reaches_a_template_that_reads_it() -> None:
    by_name = await prompt_of(source("gpt_oss"), reasoning_effort="high")
    assert "Reasoning: high\n" in by_name
    variables = {"reasoning_effort": "high"}
    assert by_name == await prompt_of(source("gpt_oss"), chat_template_kwargs=variables)
    fields = {"chat_template_kwargs": {"model_identity": "I am."}, "tools": [TOOL]}
    text = await prompt_of(source("gpt_oss"), reasoning_effort="low", **fields)
    assert "Reasoning: low\n" in text and "I am." in text
    with pytest.raises(InvalidRequest, match="give one"):
        await prompt_of(source("gpt_oss"), reasoning_effort="high", chat_template_kwargs=variables)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{# reasoning_effort #}{{ 'reasoning_effort' }}",
        "{% set reasoning_effort = 'high' %}{{ reasoning_effort }}",
    ],
)
async def test_reasoning_effort_that_no_template_reads_is_refused(template: str) -> None:
    with pytest.raises(InvalidRequest, match="'m' reads no reasoning_effort") as refused:
        await prompt_of(template, reasoning_effort="high")
    assert refused.value.field == "reasoning_effort"


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"messages": []}, "messages is not a variable"),
        ({"tools": None}, "tools is not a variable"),
        ({"bos_token": "x"}, "bos_token is not a variable"),
        ({"raise_exception": 1}, "raise_exception is not a variable"),
        ({"a b": 1}, "letters"),
        ({"_x": 1}, "letters"),
        ({"": 1}, "letters"),
        ({f"v{i}": 1 for i in range(33)}, "at most 32 variables"),
        ({"x": [0] * 1024}, "at most 1024 values"),
        (["x"], "dict"),
    ],
)
def test_variables_out_of_bounds_are_refused(variables: object, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word) as refused:
        request(chat_template_kwargs=variables)
    assert str(refused.value.field).startswith("chat_template_kwargs")


def test_variables_hide_no_function_of_a_template() -> None:
    assert TemplateEnvironment().globals.keys() <= RESERVED_VARIABLES


def test_variables_too_deep_are_refused() -> None:
    deep: Json = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested over"):
        request(chat_template_kwargs={"x": deep})


@pytest.mark.parametrize("text", ["", "a", "é\n"])
async def test_reversed_text_is_rendered_at_any_length(text: str) -> None:
    template = "{{ messages[0].content[::-1] }}{{ messages[1:][::-1] | length }}{{ [][::-1] }}"
    chat = [{"role": "user", "content": text}]
    assert await prompt_of(template, messages=chat) == text[::-1] + "0[]"


async def test_the_loop_goes_on_beside_a_long_chat() -> None:
    chat = [ASKED, {"role": "assistant", "content": "x"}] * 100
    slow = "{% for m in messages %}{% for i in range(2000) %}{% endfor %}{{ m.role }}{% endfor %}"
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0)
            beats += 1

    beating = asyncio.create_task(beat())
    text = await prompt_of(slow, messages=chat)
    beating.cancel()
    assert text == "userassistant" * 100 and beats > 5


async def test_a_long_chat_that_ends_leaves_the_thread_to_the_next() -> None:
    loops = "{% for j in range(9) %}{% for i in range(50000) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(loops + "{{ messages[0].role }}", {})
    first = asyncio.create_task(template.render_apart([ASKED]))
    # The thread has to render when its caller is cancelled.
    await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await template.render_apart([ASKED]) == "user"
