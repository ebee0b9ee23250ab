"""Chat templates against transformers' own rendering, and what a template may not do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.router.templates.chat_template import ChatTemplate
from baton.router.templates.model_card import read_card
from baton.runtime.errors import InvalidRequest, ModelError
from tests.support.json_values import Json, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<call>' }}{{- tool_call | tojson }}{{- '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>tool\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
INSTRUCT = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ ' ' + message['content'] | trim + eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}"""
HEADERS = """{{- bos_token }}
{%- set ns = namespace(system='', last=0) %}
{%- for message in messages %}{%- set ns.last = loop.index0 %}{%- endfor %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content|trim %}{%- set messages = messages[1:] %}
{%- endif %}
<head>system</head>
{{ ns.system }}
{%- for message in messages %}
    {{- '<head>' + message.role + '</head>\\n\\n' + message.content | trim + '<end>' }}
    {%- if loop.last %}{{- ns.last }}{%- endif %}
{%- endfor %}
{%- for message in messages[::-1] %}{%- if message.role == 'user' %}{{- loop.index }}
{%- break %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<head>assistant</head>\\n\\n' }}{%- endif %}"""

TURNS: list[list[JsonObject]] = [
    [{"role": "user", "content": "  Hello <b>world</b> & 'all' 🎉 "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b\n"},
        {"role": "user", "content": "c"},
    ],
    [{"role": "system", "content": "Être\n bref"}, {"role": "user", "content": "x"}],
]
WITH_CALL: list[JsonObject] = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "é<", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "content": "42"},
]

TOOLS: list[JsonObject] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "The temperature's <degrees> & more, é",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string"}, "days": {"type": "array"}},
                "required": ["where"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "other")
]


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> PreTrainedTokenizerFast:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(model_folder / "tokenizer.json"), **SPECIAL
    )


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        *((source, messages) for source in (CHATML, HEADERS) for messages in TURNS),
        *((INSTRUCT, messages) for messages in TURNS[:2]),
        (CHATML, WITH_CALL),
    ],
)
def test_renders_as_transformers_does(
    reference: PreTrainedTokenizerFast, source: str, messages: list[JsonObject]
) -> None:
    expected = reference.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(source, SPECIAL).render(messages) == expected


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
@pytest.mark.parametrize("reported", [True, False])
def test_tools_are_rendered_as_transformers_does(
    reference: PreTrainedTokenizerFast, tool_templates: dict[str, str], name: str, reported: bool
) -> None:
    asked = {"role": "user", "content": "Wie ist es in Zürich?"}
    function = {"name": "weather", "arguments": {"where": "Zürich <&>", "days": [1, 2.5, None]}}
    call = {"id": "abcdEF012", "type": "function", "function": function}
    messages = [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"now": "rain"}', "tool_call_id": call["id"]},
    ]
    for count in (1, 3):
        expected = reference.apply_chat_template(
            messages[:count],
            tools=TOOLS if reported else None,
            chat_template=tool_templates[name],
            tokenize=False,
            add_generation_prompt=True,
        )
        template = ChatTemplate(tool_templates[name], SPECIAL)
        assert template.render(messages[:count], TOOLS if reported else None) == expected
        assert ("temperature" in expected) == reported and ("[1, 2.5, null]" in expected) == (
            count > 1
        )


def test_a_template_for_tools_is_used_with_tools_only() -> None:
    template = ChatTemplate("plain", {}, with_tools="{{ tools | length }} tools")
    assert template.render(TURNS[0]) == "plain"
    assert template.render(TURNS[0], []) == "plain"
    assert template.render(TURNS[0], TOOLS) == "2 tools"
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("plain", {}, with_tools="{% if %}")


def test_an_answer_is_asked_for_unless_it_is_not_wanted() -> None:
    template = ChatTemplate("{{ add_generation_prompt }}", {})
    assert template.render([]).lower() == "true"
    assert template.render([], answer=False).lower() == "false"


def test_a_refusal_is_the_clients_error() -> None:
    template = ChatTemplate(INSTRUCT, SPECIAL)
    with pytest.raises(InvalidRequest, match="must alternate") as refused:
        template.render(TURNS[2])
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
        "{{ nothing.of.this }}",
    ],
)
def test_what_cannot_be_rendered_ends(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        ChatTemplate(source, {}).render(TURNS[0])


def test_messages_are_data_not_templates() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": "{{ 7 * 7 }}"}]) == "{{ 7 * 7 }}"


def test_developer_is_system_to_a_template_that_does_not_know_it() -> None:
    message = {"role": "developer", "content": "x"}
    assert ChatTemplate("{{ messages[0].role }}", {}).render([message]) == "system"
    knowing = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert ChatTemplate(knowing, {}).render([message]) == "yes"


def test_dates() -> None:
    assert ChatTemplate("{{ strftime_now('%Y')|int > 2000 }}", {}).render([]).lower() == "true"


def test_a_template_that_does_not_compile_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="does not compile") as refused:
        ChatTemplate("{% if %}", {})
    with pytest.raises(ModelError, match="No filter named"):
        ChatTemplate("{{ messages[0].content | no_such_filter }}", {})
    assert "\n" not in str(refused.value)


def folder_with(tmp_path: Path, **files: Json) -> Path:
    config = {"vocab_size": 9, "max_position_embeddings": 5, "eos_token_id": [1, 2]}
    made: JsonObject = {"config.json": config, "tokenizer.json": {}, **files}
    for name, content in made.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_card(tmp_path: Path) -> None:
    listed = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = folder_with(
        tmp_path,
        **{
            "tokenizer_config.json": {
                "chat_template": listed,
                "bos_token": {"content": "<s>"},
                "eos_token": "</s>",
                "pad_token": None,
            },
            "generation_config.json": {"eos_token_id": 7},
        },
    )
    card = read_card(folder, "m")
    assert card.tool_template == "T"
    assert (card.template, card.special) == ("D", {"bos_token": "<s>", "eos_token": "</s>"})
    assert (card.max_context, card.vocab_size, card.end_tokens) == (5, 9, frozenset({7}))
    (folder / "chat_template.jinja").write_text("J")
    (folder / "generation_config.json").unlink()
    card = read_card(folder, "m")
    assert (card.template, card.tool_template) == ("J", None)
    assert card.end_tokens == {1, 2}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", None),
        ("tokenizer.json", None),
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", {"vocab_size": 9}),
        ("tokenizer_config.json", {"chat_template": 3}),
        ("tokenizer_config.json", {"chat_template": [1]}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
    ],
)
def test_a_broken_folder_is_named(
    tmp_path: Path, name: str, content: str | list[object] | dict[str, object] | None
) -> None:
    folder = folder_with(tmp_path, **({} if content is None else {name: content}))
    if content is None:
        (folder / name).unlink()
    with pytest.raises(ModelError, match=name):
        read_card(folder, "m")


@pytest.mark.parametrize(
    ("text", "context", "vocab"),
    [
        ({"model_type": "gemma3_text"}, 131_072, 262_208),
        ({"model_type": "gemma3_text", "vocab_size": 9, "max_position_embeddings": 5}, 5, 9),
        ({"model_type": "other", "vocab_size": 9, "max_position_embeddings": 5}, 5, 9),
    ],
)
def test_card_of_a_model_for_images(
    tmp_path: Path, text: JsonObject, context: int, vocab: int
) -> None:
    config = {"text_config": text, "eos_token_id": [1, 106]}
    card = read_card(folder_with(tmp_path, **{"config.json": config}), "m")
    assert (card.max_context, card.vocab_size) == (context, vocab)
    assert card.end_tokens == {1, 106}


def test_sizes_that_are_not_known_are_named(tmp_path: Path) -> None:
    config = {"text_config": {"model_type": "other"}, "max_position_embeddings": 5}
    with pytest.raises(ModelError, match=r"config\.json: max_position_embeddings is None"):
        read_card(folder_with(tmp_path, **{"config.json": config}), "m")
