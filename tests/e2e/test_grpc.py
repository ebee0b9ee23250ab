"""gRPC clients against real processes: the tokens are those of HTTP, and what a client gives up
is freed on every worker in whatever phase it is."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable
from pathlib import Path

import grpc
import httpx
import pytest

from baton.proto import client_pb2, client_pb2_grpc
from chaos.cluster import Cluster
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness

ROOT = Path(__file__).resolve().parent.parent.parent
LONG = " ".join(f"word {n}" for n in range(200))
USER = {"role": "user", "content": "Where is the red lamp?"}
REASONS = {client_pb2.STOP: "stop", client_pb2.LENGTH: "length"}


@pytest.fixture
async def stub(pair: Cluster) -> AsyncIterator[client_pb2_grpc.InferenceStub]:
    address = (pair.folder / "router.grpc_address").read_text().strip()
    async with grpc.aio.insecure_channel(address) as channel:
        yield client_pb2_grpc.InferenceStub(channel)


async def collect(
    call: AsyncIterable[client_pb2.GenerateResponse],
) -> tuple[dict[int, tuple[str, str]], client_pb2.Usage]:
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    usage = client_pb2.Usage()
    async for message in call:
        for piece in message.pieces:
            texts[piece.choice] = texts.get(piece.choice, "") + piece.text
            if piece.finish_reason:
                ends[piece.choice] = REASONS[piece.finish_reason]
        if message.HasField("usage"):
            usage = message.usage
    return {choice: (text, ends[choice]) for choice, text in texts.items()}, usage


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "max_tokens": 24},
        {"temperature": 0.9, "seed": 5, "max_tokens": 16, "n": 3, "top_k": 40},
        {"temperature": 1.2, "seed": 6, "max_tokens": 30, "stop": ["e"], "presence_penalty": 0.5},
    ],
)
@pytest.mark.parametrize("kind", ["prompt", "messages"])
async def test_the_same_tokens_by_grpc_as_by_http(
    stub: client_pb2_grpc.InferenceStub,
    client: httpx.AsyncClient,
    kind: str,
    fields: JsonObject,
) -> None:
    source: JsonObject = {"prompt": LONG} if kind == "prompt" else {"messages": [USER]}
    path = "/v1/completions" if kind == "prompt" else "/v1/chat/completions"
    answer = await client.post(path, json={"model": "small", **source, **fields})
    assert answer.status_code == 200, answer.text
    http = {
        c["index"]: (c["text"] if "text" in c else c["message"]["content"], c["finish_reason"])
        for c in answer.json()["choices"]
    }
    got, usage = await collect(
        stub.Generate(client_pb2.GenerateRequest(model="small", **source, **fields))
    )
    assert {choice: got.get(choice, ("", "stop")) for choice in http} == http
    reported = answer.json()["usage"]
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        reported["prompt_tokens"],
        reported["completion_tokens"],
    )


@pytest.mark.parametrize("page", ["README.md", "docs/api.md"])
def test_the_client_that_the_documentation_shows(pair: Cluster, page: str) -> None:
    (code,) = re.findall(r"```python\n(import grpc.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert code.count("\n") <= 12
    address = (pair.folder / "router.grpc_address").read_text().strip()
    code = code.replace("127.0.0.1:8001", address).replace("baton-tiny", "small")
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * slowness())
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()


MORE_DELAYS_S = [
    pytest.param(delay_s, marks=pytest.mark.nightly) for delay_s in (0.02, 0.05, 0.2, 0.5, 1.0)
]


@pytest.mark.parametrize("delay_s", [0.0, 0.1, *MORE_DELAYS_S])
@pytest.mark.parametrize("way", ["cancel", "deadline"])
async def test_what_a_client_gives_up_is_freed(
    stub: client_pb2_grpc.InferenceStub, all_freed: Callable[[], None], way: str, delay_s: float
) -> None:
    """The delays reach from tokenizing over queue, prefill and fetch into decoding."""
    asked = client_pb2.GenerateRequest(
        model="small", prompt=f"{way} {delay_s} {LONG}", max_tokens=1000, ignore_eos=True, n=2
    )
    call = stub.Generate(asked, timeout=delay_s + 0.005 if way == "deadline" else None)
    if way == "cancel":
        # The client gives up at this moment of its answer.
        await asyncio.sleep(delay_s)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collect(call)
    else:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await collect(call)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    all_freed()
