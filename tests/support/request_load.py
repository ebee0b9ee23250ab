"""A seeded mix of requests for real processes, and what comes back."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from baton.models.corpus import mix
from tests.support.machine_speed import slowness

TASKS = ("chat", "facts", "recall", "lists", "arithmetic", "json", "story")
ANSWER_S = 120.0 * slowness()  # to the next byte of an answer, beside those of all others
Choices = dict[int, dict[str, Any]]  # of a request, by index: text, finish reason, tokens, logprobs


class RequestLoad:
    """A seeded mix of requests, sent at once, and what came back for each."""

    def __init__(self, count: int, seed: int, *, longest: int = 450) -> None:
        rng = random.Random(seed)
        self.bodies = [self._body(rng, longest) for _ in range(count)]

    def _body(self, rng: random.Random, longest: int) -> dict[str, Any]:
        words = ["river", "stone", "seven", "Ada", "blue", "lamp", "counts", "über", "日本", "?"]
        length = int(rng.choice([3, 20, 80, 200, longest]) * rng.uniform(0.5, 1.0)) + 1
        text = " ".join(rng.choice(words) for _ in range(length))
        body: dict[str, Any] = {
            "model": "small",
            "max_tokens": rng.choice([1, 5, 12, 24, 40]),
            "temperature": rng.choice([0, 0, 0.7, 1.2]),
            "seed": rng.randrange(1 << 30),
            "stream": rng.random() < 0.5,
            "ignore_eos": rng.random() < 0.5,
        }
        kind = rng.random()
        if kind < 0.25:
            body["messages"] = [{"role": "user", "content": text}]
        elif kind < 0.5:
            talk = mix.of_task(rng.randrange(10_000), rng.choice(TASKS), held_out=True)
            body["messages"] = list(talk.messages[:-1])  # the last is the right answer
        else:
            body["prompt"] = text
        self._extras(rng, body)
        return body

    def _extras(self, rng: random.Random, body: dict[str, Any]) -> None:
        if rng.random() < 0.25:
            body["n"] = 3
        if rng.random() < 0.3:
            body |= {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2}
        if rng.random() < 0.25:
            body |= {"top_k": 40, "top_p": 0.9, "min_p": 0.01}
        if rng.random() < 0.3:
            body["stop"] = rng.sample(["a", "in", "the", "or", "\n", "st"], 2)
        if rng.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 3} if "messages" in body else {"logprobs": 3}

    async def run(
        self, url: str, concurrency: int, first: int | None = None, salt: str = ""
    ) -> list[Choices]:
        """The choices of each request, by index; of the `first` ones, or of all. No prefix is
        found that was asked for with another `salt`."""
        gate = asyncio.Semaphore(concurrency)
        async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as client:

            async def one(body: dict[str, Any]) -> Choices:
                async with gate:
                    return await ask(client, body | {"cache_salt": salt} if salt else body)

            return list(await asyncio.gather(*(one(body) for body in self.bodies[:first])))


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Choices:
    """One request, streamed or not: text, finish reason and logprob tokens of each choice."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if not body.get("stream"):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return {c["index"]: _choice([c]) for c in answer.json()["choices"]}
    parts: dict[int, list[dict[str, Any]]] = {}
    last = ""
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            last = line or last
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                parts.setdefault(choice["index"], []).append(choice)
    assert last == "data: [DONE]", f"the stream ended with {last!r}"
    return {index: _choice(chunks) for index, chunks in sorted(parts.items())}


def _choice(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    text, tokens, logprobs = "", [], []
    for chunk in chunks:
        message = chunk.get("delta") or chunk.get("message") or {}
        text += chunk.get("text") or message.get("content") or ""
        given = chunk.get("logprobs") or {}
        for entry in given.get("content") or []:
            tokens.append(entry["token"])
            logprobs.append(entry["logprob"])
        tokens += given.get("tokens") or []
        logprobs += given.get("token_logprobs") or []
    reasons = [c["finish_reason"] for c in chunks if c.get("finish_reason")]
    return {"text": text, "finish": reasons, "tokens": tokens, "logprobs": logprobs}


def differences(got: list[Choices], expected: list[Choices]) -> list[str]:
    """The choices that are not token for token the same; logprobs within 1e-3."""
    found = []
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        for index in sorted(ours.keys() | theirs.keys()):
            a, b = ours.get(index), theirs.get(index)
            if a is None or b is None or {**a, "logprobs": 0} != {**b, "logprobs": 0}:
                found.append(f"request {number} choice {index}:\n  {a}\n  {b}")
            elif a["logprobs"] != pytest.approx(b["logprobs"], abs=1e-3):
                found.append(f"request {number} choice {index}: logprobs differ")
    return found
