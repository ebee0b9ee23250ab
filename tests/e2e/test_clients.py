"""What people call it with: the official openai client, sync and async, and curl."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from chaos.cluster import Cluster
from tests.support.json_values import JsonObject

MESSAGES: list[Any] = [{"role": "user", "content": "Where is the red lamp?"}]
SETTINGS: JsonObject = {"model": "small", "max_tokens": 12, "temperature": 0.7, "seed": 5}


@pytest.fixture
def sync_client(pair: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_streamed_and_whole_are_the_same_text(sync_client: openai.OpenAI) -> None:
    whole = sync_client.chat.completions.create(messages=MESSAGES, **SETTINGS)
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert whole.usage is not None and 0 < whole.usage.completion_tokens <= 12
    stream = sync_client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SETTINGS
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_with_choices_and_logprobs(sync_client: openai.OpenAI) -> None:
    settings = {**SETTINGS, "temperature": 2.0}  # the model is sure of itself
    answer = sync_client.completions.create(prompt="the river", n=3, logprobs=2, **settings)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs)


def test_a_repeated_prompt_is_cached(sync_client: openai.OpenAI) -> None:
    prompt = "a long walk along the river and over the hill " * 10
    for cached in (False, True):
        answer = sync_client.completions.create(prompt=prompt, **SETTINGS)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        tokens = answer.usage.prompt_tokens_details.cached_tokens or 0
        assert (tokens > 0) is cached and tokens < answer.usage.prompt_tokens


async def test_the_async_client(pair: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(messages=MESSAGES, **SETTINGS)
        stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **SETTINGS)
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    assert text == whole.choices[0].message.content


def test_the_clients_own_errors(sync_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'small'"):
        sync_client.completions.create(prompt="x", model="another")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        sync_client.completions.create(prompt="x", model="small", temperature=-1)


def test_curl(pair: Cluster) -> None:
    body = json.dumps({"messages": MESSAGES, "stream": True, **SETTINGS})
    command = ["curl", "-sS", "-N", f"{pair.url}/v1/chat/completions"]
    command += ["-H", "Content-Type: application/json", "-d", body]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    events = [line for line in lines.splitlines() if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"


def test_curl_with_a_bad_body(pair: Cluster) -> None:
    command = ["curl", "-sS", "-o", "-", "-w", "\n%{http_code}", f"{pair.url}/v1/completions"]
    command += ["-H", "Content-Type: application/json", "-d", '{"model": "small", "prompt": ']
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    text, code = out.rsplit("\n", 1)
    assert code == "400" and "JSON" in json.loads(text)["error"]["message"]
