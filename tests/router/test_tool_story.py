"""Tools through real HTTP with the official client: what a model says becomes calls, and calls
and results go back to it. The workers say what the test gives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall as FunctionCall

from baton.router.text.tokenizer import HfTokenizer
from tests.support.json_values import Json, JsonObject
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartRouter
from tests.support.waiting import eventually

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIME: JsonObject = {"type": "function", "function": {"name": "get_time"}}
ASKED: list[JsonObject] = [{"role": "user", "content": "Wie ist es in Zürich?"}]
ARGUMENTS = '{"city": "Zürich"}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
SAID = {
    "hermes": f"Moment.\n<tool_call>\n{CALL}\n</tool_call>\n"
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "llama": f'{CALL}; {{"name": "get_time", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS] [{CALL}, {{"name": "get_time", "arguments": {{}}}}]',
}
SPECIAL = {"hermes": ("<tool_call>", "</tool_call>"), "mistral": ("[TOOL_CALLS]",)}


async def says(running: RunningRouter, folder: Path, *texts: str) -> None:
    """What each choice of the next requests is."""
    tokenizer = HfTokenizer(folder / "tokenizer.json")
    reported = [await tokenizer.encode(text, add_special_tokens=False) for text in texts]
    await tokenizer.close()
    for worker in running.workers.values():
        worker.says = reported


def client_of(running: RunningRouter) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


async def ask(client: openai.AsyncOpenAI, **fields: Json) -> Any:
    made = {"model": "tiny", "messages": ASKED, "tools": [WEATHER, TIME], **fields}
    return await client.chat.completions.create(**made)


async def streamed(
    client: openai.AsyncOpenAI, choices: int = 1, **fields: Json
) -> list[JsonObject]:
    """The messages that a stream adds up to, with their finish reasons, as clients add up."""
    found = [
        {"content": None, "tool_calls": [], "finish_reason": None, "role": None}
        for _ in range(choices)
    ]
    async for chunk in await ask(client, n=choices, stream=True, **fields):
        for choice in chunk.choices:
            into = found[choice.index]
            assert into["finish_reason"] is None, "nothing follows the end"
            into["role"] = choice.delta.role or into["role"]
            if choice.delta.content is not None:
                into["content"] = (into["content"] or "") + choice.delta.content
            for call in choice.delta.tool_calls or ():
                if call.index == len(into["tool_calls"]):
                    assert call.type == "function" and call.function.arguments == ""
                    into["tool_calls"].append([call.id, call.function.name, ""])
                else:
                    assert call.index == len(into["tool_calls"]) - 1
                    assert call.id is None and call.function.name is None
                    into["tool_calls"][-1][2] += call.function.arguments
            into["finish_reason"] = choice.finish_reason
    return found


def calls_of(calls: Sequence[FunctionCall]) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
@pytest.mark.parametrize("special", [False, True])
async def test_calls_of_each_form(
    router: StartRouter, tool_model: Callable[..., Path], name: str, special: bool
) -> None:
    """Markers may be special tokens, which are not shown otherwise."""
    folder = tool_model(name, SPECIAL.get(name, ()) if special else ())
    async with router(folder) as running, client_of(running) as client:
        await says(running, folder, SAID[name])
        whole = (await ask(client)).choices[0]
        content = "Moment." if name == "hermes" else None
        wanted = [("get_weather", ARGUMENTS), ("get_time", "{}")]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", content)
        assert calls_of(whole.message.tool_calls) == wanted
        ids = [call.id for call in whole.message.tool_calls]
        assert len(set(ids)) == 2 and all(len(bytes.fromhex(i[5:])) == 16 for i in ids)
        (parts,) = await streamed(client)
        assert (parts["role"], parts["finish_reason"]) == ("assistant", "tool_calls")
        assert parts["content"] == content
        assert [(called, reported) for _, called, reported in parts["tool_calls"]] == wanted
        assert len({*ids, *(i for i, *_ in parts["tool_calls"])}) == 4


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
async def test_a_call_and_its_result_go_back(
    router: StartRouter, tool_model: Callable[..., Path], name: str
) -> None:
    folder = tool_model(name)
    async with router(folder) as running, client_of(running) as client:
        await says(running, folder, SAID[name].split(";")[0])
        message = (await ask(client, tools=[WEATHER])).choices[0].message
        if name == "hermes":  # the second call is of a tool that was not given: it is content
            assert message.content is not None and "get_time" in message.content
        if message.tool_calls is None:
            assert name == "mistral"  # one unknown name in a list spoils it
            await says(running, folder, f"[TOOL_CALLS] [{CALL}]")
            message = (await ask(client, tools=[WEATHER])).choices[0].message
        (call,) = message.tool_calls
        reported = message.model_dump(exclude_none=True)
        answer = {"role": "tool", "tool_call_id": call.id, "content": "Regen"}
        again = await ask(client, messages=[*ASKED, reported, answer])
        assert again.choices[0].finish_reason in ("stop", "tool_calls")
        submit = running.workers["decode-0"].seen("submit")[-1]
        tokenizer = HfTokenizer(folder / "tokenizer.json")
        prompt = tokenizer.decode(submit.prompt, skip_special_tokens=False)
        await tokenizer.close()
        assert prompt.count(ARGUMENTS) == 1 and "\\u00" not in prompt  # an object, not a text
        assert "Regen" in prompt and "The weather of a city." in prompt


async def test_choices_call_each_for_itself(
    router: StartRouter, tool_model: Callable[..., Path]
) -> None:
    folder = tool_model("hermes")
    texts = [SAID["hermes"], "No call.", "<tool_call>\n{broken}\n</tool_call>", "<tool_call>"]
    async with router(folder) as running, client_of(running) as client:
        await says(running, folder, *texts)
        whole = (await ask(client, n=4)).choices
        assert [choice.finish_reason for choice in whole] == ["tool_calls", "stop", "stop", "stop"]
        assert [choice.message.content for choice in whole] == ["Moment.", *texts[1:]]
        assert [len(choice.message.tool_calls or ()) for choice in whole] == [2, 0, 0, 0]
        parts = await streamed(client, 4)
        assert [part["content"] for part in parts] == ["Moment.", *texts[1:]]
        assert [len(part["tool_calls"]) for part in parts] == [2, 0, 0, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_stops_and_limits(
    router: StartRouter, tool_model: Callable[..., Path], stream: bool
) -> None:
    folder = tool_model("hermes")
    async with router(folder) as running, client_of(running) as client:
        text = f"{SAID['hermes']} And more."
        await says(running, folder, text)

        async def found(**fields: Json) -> tuple[str | None, int, str]:
            if stream:
                (part,) = await streamed(client, **fields)
                return part["content"], len(part["tool_calls"]), part["finish_reason"]
            choice = (await ask(client, **fields)).choices[0]
            return (
                choice.message.content,
                len(choice.message.tool_calls or ()),
                choice.finish_reason,
            )

        assert await found() == ("Moment.And more.", 2, "tool_calls")
        assert await found(stop=" more") == ("Moment.And", 2, "tool_calls")
        assert await found(stop=["get_time"]) == (
            'Moment.<tool_call>\n{"name": "',
            1,
            "tool_calls",
        )
        assert await found(stop="</tool_call>") == ("Moment.", 1, "tool_calls")
        assert await found(stop="Zürich") == (text[: text.index("Zürich")], 0, "stop")
        assert await found(max_tokens=3) == (text[:0] + "Mom", 0, "length")
        assert await found(parallel_tool_calls=False) == ("Moment.", 1, "tool_calls")


async def test_one_call_ends_the_generation(
    router: StartRouter, tool_model: Callable[..., Path]
) -> None:
    folder = tool_model("hermes")
    async with router(folder) as running, client_of(running) as client:
        worker = running.workers["decode-0"]
        await says(running, folder, SAID["hermes"])
        worker.step_s = 0.005
        answer = await ask(client, parallel_tool_calls=False)
        assert calls_of(answer.choices[0].message.tool_calls) == [("get_weather", ARGUMENTS)]
        assert answer.usage.completion_tokens < len(worker.says[0])
        await eventually(lambda: len(worker.seen("cancel")) == 1 and not worker.held)


async def test_without_tools_an_answer_is_content(
    router: StartRouter, tool_model: Callable[..., Path]
) -> None:
    folder = tool_model("hermes")
    async with router(folder) as running, client_of(running) as client:
        await says(running, folder, SAID["hermes"])
        for fields in ({"tools": []}, {"tools": openai.omit}, {"tool_choice": "none"}):
            choice = (await ask(client, **fields)).choices[0]
            assert (choice.message.content, choice.finish_reason) == (SAID["hermes"], "stop")
            assert choice.message.tool_calls is None
            prompt = running.workers["decode-0"].seen("submit")[-1].prompt
            tokenized = await running.http.post("/tokenize", json={"messages": ASKED})
            assert list(prompt) == tokenized.json()["tokens"]  # the model is told of none
        tokenized = await running.http.post("/tokenize", json={"messages": ASKED, "tools": [TIME]})
        await ask(client, tools=[TIME])
        prompt = running.workers["decode-0"].seen("submit")[-1].prompt
        assert list(prompt) == tokenized.json()["tokens"]


async def test_the_setting_names_a_form_or_none(
    router: StartRouter, tool_model: Callable[..., Path]
) -> None:
    folder = tool_model("text")
    async with router(folder) as running, client_of(running) as client:
        with pytest.raises(openai.BadRequestError, match=r"router\.tool_calls") as refused:
            await ask(client)
        assert refused.value.param == "tools"
        assert (await ask(client, tool_choice="none", max_tokens=2)).choices
    for setting, calls in (("none", 0), ("hermes", 2), ("mistral", 0)):
        config = replace(FAST_ROUTER, tool_calls=setting)
        async with router(folder, config=config) as running, client_of(running) as client:
            await says(running, folder, SAID["hermes"])
            message = (await ask(client)).choices[0].message
            assert len(message.tool_calls or ()) == calls
            assert message.content == ("Moment." if calls else SAID["hermes"])


async def test_logprobs_are_those_of_all_tokens(
    router: StartRouter, tool_model: Callable[..., Path]
) -> None:
    folder = tool_model("hermes")
    async with router(folder) as running, client_of(running) as client:
        await says(running, folder, SAID["hermes"])
        entries = (await ask(client, logprobs=True)).choices[0].logprobs.content
        reported = b"".join(bytes(entry.bytes) for entry in entries).decode()
        assert reported == SAID["hermes"]
        body = {"model": "tiny", "messages": ASKED, "tools": [WEATHER, TIME], "stream": True}
        reply = await running.http.post("/v1/chat/completions", json={**body, "logprobs": True})
        count = 0
        for line in reply.text.splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    count += len((choice["logprobs"] or {"content": []})["content"])
                    assert "<tool" not in (choice["delta"].get("content") or "")
        assert count == len(entries)
