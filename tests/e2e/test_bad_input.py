"""Attackers and clumsy users against real processes: bad requests, bad messages, bad starts.

Whatever comes, the workers end up at rest and the next request is served.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from baton.models.embedded import embedded_model
from baton.proto import handoff_pb2, handoff_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.runtime.grpc_links import credentials
from baton.runtime.links import LINK_PROTOCOL_VERSION
from chaos.cluster import Cluster
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness

TOKEN = "a secret of this test"
WORST = 2**32 - 1
COMPLETE = "/v1/completions"
BATON = [sys.executable, "-P", "-m", "baton.deploy.cli.main"]


async def served(client: httpx.AsyncClient) -> None:
    answer = await client.post(COMPLETE, json={"model": "small", "prompt": "hi", "max_tokens": 2})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("numbers", "param"),
    [
        pytest.param(2_700_000, None, marks=pytest.mark.nightly, id="counted"),
        pytest.param(1_000_000, "prompt[0]", id="read"),
    ],
)
async def test_the_largest_bad_body_delays_no_other_request(
    pair: Cluster, client: httpx.AsyncClient, numbers: int, param: str | None
) -> None:
    """A stream of another client goes on without a migration: no link fell silent."""
    bad = '{"model":"small","prompt":[' + "-1," * numbers + "-1]}"
    stream: JsonObject = {"model": "small", "prompt": "a", "max_tokens": 300}
    stream |= {"stream": True, "ignore_eos": True}
    before = pair.logs().count("link lost")
    streaming = asyncio.create_task(client.post(COMPLETE, json=stream))
    for _ in range(3):
        answer = await client.post(COMPLETE, content=bad)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    assert (await streaming).text.rstrip().endswith("[DONE]")
    assert pair.logs().count("link lost") == before


async def test_a_crowd_that_vanishes_leaves_nothing(
    pair: Cluster, client: httpx.AsyncClient
) -> None:
    host, port = pair.url.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": "small", "prompt": "hi", "max_tokens": 500, "n": 16, "stream": True}
    ).encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    request = head % (COMPLETE.encode(), len(body)) + body
    writers = []
    for number in range(100):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(request if number % 2 else request[: len(request) // 2])
        writers.append(writer)
    # The router has to hold what has come of the requests; no metric tells how much that is.
    await asyncio.sleep(0.5)
    for writer in writers:
        writer.transport.abort()
    await served(client)
    await asyncio.to_thread(pair.quiet, 10)


@pytest.mark.parametrize("path", [COMPLETE, "/v1/chat/completions"])
async def test_a_body_over_the_default_limit_is_refused_for_its_size(
    client: httpx.AsyncClient, path: str
) -> None:
    limit = 8 << 20
    bad = b'{"model":"small","prompt":"' + b"a" * limit + b'"}'
    answer = await client.post(path, content=bad)
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and str(limit) in error["message"], error
    just_fits = b"{" + b" " * (limit - 2) + b"}"
    assert (await client.post(path, content=just_fits)).status_code == 400  # for what it lacks
    await served(client)


async def test_no_prompt_is_in_a_log(pair: Cluster, client: httpx.AsyncClient) -> None:
    secret = "xyzzy plugh"
    for body in (
        {"prompt": secret, "max_tokens": 2},
        {"prompt": secret, "max_tokens": 0},
        {"prompt": [secret], "stop": [secret], "user": secret, "wat": secret},
    ):
        await client.post(COMPLETE, json={"model": "small", **body})
    for path in pair.folder.glob("*.log"):
        assert secret not in path.read_text(), path.name


# -- the workers' own ports ---------------------------------------------------------------------


def submit(**changed: object) -> worker_pb2.RouterMessage:
    fields: dict[str, Any] = {
        "request_id": f"bad-{os.urandom(8).hex()}",
        "attempt": 1,
        "prompt": [1, 2, 3],
        "choices": [worker_pb2.Choice(choice=0)],
        "sampling": worker_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1, seed=1),
        "max_tokens": 3,
        "placement": worker_pb2.Placement(local=True),
        **changed,
    }
    return worker_pb2.RouterMessage(submit=worker_pb2.Submit(**fields))


REFUSED_SUBMITS = [
    {"prompt": [WORST]},
    {"prompt": []},
    {"prompt": [1] * 500_000},
    {"max_tokens": 0},
    {"max_tokens": WORST},
    {"choices": [worker_pb2.Choice(choice=0)] * 2},
    {"choices": [worker_pb2.Choice(choice=n) for n in range(5000)]},
    {"choices": [worker_pb2.Choice(choice=0, accepted=[WORST])]},
    {"sampling": worker_pb2.Sampling()},
    {"sampling": worker_pb2.Sampling(temperature=float("nan"), top_p=1, repetition_penalty=1)},
]


async def test_bad_submits_end_alone(pair: Cluster) -> None:
    async with pair.channel("decode-0") as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Link(metadata=credentials(TOKEN))
        hello = worker_pb2.RouterHello(
            router_id="evil", boot_id=os.urandom(16), protocol_version=LINK_PROTOCOL_VERSION
        )
        await call.write(worker_pb2.RouterMessage(hello=hello))
        ends: dict[str, int] = {}
        await call.write(submit(choices=[]))  # no request to answer
        for message in [submit(**changed) for changed in REFUSED_SUBMITS] + [submit()]:
            await call.write(message)
            ends[message.submit.request_id] = 0
        async with asyncio.timeout(20 * slowness()):
            while not all(ends.values()):
                for output in (await call.read()).outputs.outputs:
                    ends[output.request_id] = output.end
        assert list(ends.values())[:-1] == [worker_pb2.FAILED] * len(REFUSED_SUBMITS)
        assert list(ends.values())[-1] in (worker_pb2.LENGTH, worker_pb2.STOP)
    await asyncio.to_thread(pair.quiet, 5)


async def test_lying_readers_leave_no_pin(pair: Cluster) -> None:
    record = pair.records()["prefill-0"]
    good: dict[str, Any] = {
        "handoff_id": os.urandom(16),
        "granter_boot_id": bytes.fromhex(record.boot_id),
        "reader_boot_id": os.urandom(16),
        "tokens": [5] * 40,
        "prompt_tokens": 40,
        "choices": [0],
        "lease_ms": 500,
        "sampling": worker_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1),
    }
    lies: list[dict[str, object]] = [
        {},  # true, but the reader leaves without a word
        {"granter_boot_id": b"x"},
        {"tokens": [WORST]},
        {"prompt_tokens": WORST},
        {"held_blocks": WORST},
        {"choices": []},
        {"choices": [0, 0]},
        {"lease_ms": 0},
        {"handoff_id": b""},
    ]

    async def lie(changed: dict[str, object]) -> str:
        async with pair.channel("prefill-0") as channel:
            call = handoff_pb2_grpc.HandoffStub(channel).Open(metadata=credentials(TOKEN))
            opening = handoff_pb2.OpenHandoff(**{**good, **changed})
            await call.write(handoff_pb2.ReaderMessage(open=opening))
            async with asyncio.timeout(10 * slowness()):
                said = (await call.read()).WhichOneof("kind")
            call.cancel()
            return str(said)

    said = await asyncio.gather(*(lie(changed) for changed in lies * 5))
    assert said == (["opened"] + ["failed"] * (len(lies) - 1)) * 5
    await asyncio.to_thread(pair.quiet, 10)


async def test_a_call_without_the_token_is_refused(pair: Cluster) -> None:
    async with pair.channel("decode-0") as channel:
        for metadata in ((), credentials("guessed")):
            call = worker_pb2_grpc.WorkerStub(channel).Link(metadata=metadata)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_caller_without_a_certificate_is_refused(
    pair: Cluster, client: httpx.AsyncClient
) -> None:
    address = pair.records()["decode-0"].address
    trusted = (pair.folder / "tls" / "authority.pem").read_bytes()
    nameless = grpc.ssl_channel_credentials(trusted)
    for channel in (
        grpc.aio.insecure_channel(address),
        grpc.aio.secure_channel(address, nameless),
    ):
        async with channel:
            call = worker_pb2_grpc.WorkerStub(channel).Link(metadata=credentials(TOKEN))
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
    await served(client)


async def test_with_tls_switched_off_by_name_it_serves_and_warns(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster("security.tls=off").start(0, 1)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        await served(client)
    for name in ("router", "decode-0"):
        assert "TLS disabled" in (cluster.folder / f"{name}.log").read_text()
    async with grpc.aio.insecure_channel(cluster.records()["decode-0"].address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Link()
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED  # the token is asked for still


async def test_garbage_on_a_workers_ports(pair: Cluster) -> None:
    record = pair.records()["decode-0"]
    for address in (record.address, record.admin_address):
        host, port = address.split(":")
        for data in (bytes(50_000), os.urandom(50_000), b"POST /audit HTTP/1.1\r\n\r\n"):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            writer.transport.close()
    await asyncio.to_thread(pair.quiet, 5)


# -- starts ---------------------------------------------------------------------------------------


HERE = ["--worker-id", "a", "--model", "{model}", "--registry", "{tmp}/r"]


def nightly(arguments: list[str], words: str) -> object:
    return pytest.param(arguments, words, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--worker-id", "a", "--model", "{tmp}", "--registry", "{tmp}/r"], "config.json"),
        nightly([*HERE, "--set=worker.host=256.1.1.1", "--set=pool.blocks=64"], "worker.host"),
        nightly([*HERE, "--worker-id", "../x"], "--worker-id"),
        nightly([*HERE, "--registry", "{tmp}/file/r"], "registry"),
        nightly([*HERE, "--set=security.tls=on"], "security.certificate is not set"),
    ],
)
def test_a_worker_that_cannot_start_says_why(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "file").write_text("")
    filled = [text.format(model=embedded_model(), tmp=tmp_path) for text in arguments]
    ended = subprocess.run(
        [*BATON, "worker", "--role", "decode", "--set=security.tls=off", *filled],
        env=os.environ | {"BATON_TOKEN": "x", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60 * slowness(),
        check=False,
    )
    said = [line for line in ended.stderr.splitlines() if line.startswith("baton: error: ")]
    assert ended.returncode not in (0, None) and len(said) == 1 and words in said[0], ended.stderr
    assert "Traceback" not in ended.stderr
