"""What the front ends make of the tokenizer's queue: whose a text is, and which texts are too long
to be encoded as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from baton.proto import client_pb2
from baton.router.text import tokenizer as tokenizer_module
from baton.router.text.tokenizer import ENCODE_THREADS, HfTokenizer
from tests.support.encoding_threads import EncodingThreads
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartGrpcRouter, StartRouter
from tests.support.waiting import eventually

KEYS = replace(FAST_ROUTER, api_keys=("flood", "other"))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> EncodingThreads:
    return EncodingThreads(monkeypatch)


@pytest.mark.parametrize("front", ["HTTP", "gRPC"])
async def test_a_text_of_another_key_passes_those_of_a_flood(
    grpc_router: StartGrpcRouter, threads: EncodingThreads, front: str
) -> None:
    async with grpc_router(config=KEYS) as (running, stub):

        async def ask(key: str, text: str) -> None:
            if front == "gRPC":
                request = client_pb2.GenerateRequest(model="tiny", prompt=text, max_tokens=1)
                bearer = (("authorization", f"Bearer {key}"),)
                assert [message async for message in stub.Generate(request, metadata=bearer)]
                return
            reply = await running.http.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": text, "max_tokens": 1},
                headers={"authorization": f"Bearer {key}"},
            )
            assert reply.status_code == 200, reply.text

        async def queue(key: str, text: str) -> asyncio.Task[None]:
            task = asyncio.create_task(ask(key, text))
            await eventually(lambda: text in threads.asked)
            return task

        threads.go.clear()
        asking = [await queue("flood", f"f{number}") for number in range(ENCODE_THREADS + 4)]
        asking.append(await queue("other", "x"))
        assert sorted(threads.begun) == [f"f{number}" for number in range(ENCODE_THREADS)]
        threads.go.set()
        await asyncio.gather(*asking)
    assert threads.begun[ENCODE_THREADS] == "x"


def _complete(running: RunningRouter, text: str) -> Awaitable[httpx.Response]:
    return running.complete(prompt=text)


def _chat(running: RunningRouter, text: str) -> Awaitable[httpx.Response]:
    return running.chat(messages=[{"role": "user", "content": text}])


def _tokenize(running: RunningRouter, text: str) -> Awaitable[httpx.Response]:
    return running.http.post("/tokenize", json={"prompt": text})


@pytest.mark.parametrize("ask", [_complete, _chat, _tokenize])
async def test_a_text_too_long_is_refused_after_a_part_of_it(
    router: StartRouter,
    model_folder: Path,
    threads: EncodingThreads,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[RunningRouter, str], Awaitable[httpx.Response]],
) -> None:
    """Its length alone does not show that it is too long; the count of its tokens does."""
    monkeypatch.setattr(tokenizer_module, "SLICE_CHARS", 4096)
    text = "the lazy dog " * 3500
    tokenizer = HfTokenizer(model_folder / "tokenizer.json")
    async with router() as running:
        longest = tokenizer.longest_token_bytes
        assert len(text) < running.workers["decode-0"].max_context * longest
        threads.begun.clear()
        reply = await ask(running, text)
    await tokenizer.close()
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "characters cannot fit the context of 4096 tokens" in error["message"]
    assert 0 < sum(map(len, threads.begun)) < len(text) / 2
