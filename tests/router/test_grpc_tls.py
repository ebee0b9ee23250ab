"""Clients' gRPC by TLS 1.3, with certificates that are replaced while streams are open."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.proto import client_pb2, client_pb2_grpc
from baton.router.grpc_frontend import frontend
from tests.support.client_certificates import ClientCertificates
from tests.support.machine_speed import slowness
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartRouter, refused

pytestmark = pytest.mark.timed

ASKED = client_pb2.GenerateRequest(model="tiny", prompt="a", max_tokens=3)
LONG = client_pb2.GenerateRequest(model="tiny", prompt="a", max_tokens=40, ignore_eos=True)
ALONE = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own


@pytest.fixture
async def running(
    router: StartRouter, certificates: ClientCertificates
) -> AsyncIterator[RunningRouter]:
    config = replace(
        FAST_ROUTER, grpc_port=0, tls=str(certificates.folder), max_requests=2,
        connections_per_request=1,
    )  # fmt: skip
    async with router(config=config, trust=certificates.trusting()) as started:
        yield started


def channel_to(running: RunningRouter, certificates: ClientCertificates) -> grpc.aio.Channel:
    trusted = grpc.ssl_channel_credentials(certificates.authority.read_bytes())
    return grpc.aio.secure_channel(running.grpc_address, trusted, options=ALONE)


async def answered(running: RunningRouter, certificates: ClientCertificates) -> int:
    """How many messages a call on a connection of its own gets."""
    async with channel_to(running, certificates) as channel:
        call = client_pb2_grpc.InferenceStub(channel).Generate(ASKED, timeout=20 * slowness())
        return len([message async for message in call])


def shown(running: RunningRouter, trust: ssl.SSLContext) -> tuple[str | None, str]:
    """The version that a new connection speaks, and the name in the certificate that it sees."""
    host, port = running.grpc_address.split(":")
    trust.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), 20) as raw,
        trust.wrap_socket(raw, server_hostname=host) as secured,
    ):
        found: Any = secured.getpeercert()
        names = dict(pair for (pair,) in found["subject"])
        return secured.version(), str(names["commonName"])


async def test_clients_speak_tls_1_3_alone(
    running: RunningRouter, certificates: ClientCertificates
) -> None:
    assert await answered(running, certificates) > 0
    trust = certificates.trusting()
    version, name = await asyncio.to_thread(shown, running, trust)
    assert (version, name) == ("TLSv1.3", "router-1")
    trust.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.to_thread(shown, running, trust)


async def test_new_connections_get_a_new_certificate(
    running: RunningRouter, certificates: ClientCertificates
) -> None:
    trust, worker = certificates.trusting(), running.workers["decode-0"]
    worker.pause_at = 3
    async with channel_to(running, certificates) as channel:
        call = client_pb2_grpc.InferenceStub(channel).Generate(LONG)
        reading = aiter(call)
        await anext(reading)
        for content, name in ((None, "router-2"), (b"half a file", "router-2")):
            certificates.replace(content)
            assert await asyncio.to_thread(shown, running, trust) == ("TLSv1.3", name)
        worker.pause_at = None
        rest = [message async for message in reading]
    assert rest[-1].HasField("usage") or rest[-2].HasField("usage")


async def test_plain_text_is_refused_and_others_do_not_notice(
    running: RunningRouter, certificates: ClientCertificates
) -> None:
    worker = running.workers["decode-0"]
    worker.pause_at = 3
    async with channel_to(running, certificates) as channel:
        reading = aiter(client_pb2_grpc.InferenceStub(channel).Generate(LONG))
        await anext(reading)
        async with grpc.aio.insecure_channel(running.grpc_address, options=ALONE) as plain:
            call = client_pb2_grpc.InferenceStub(plain).Generate(ASKED, timeout=20 * slowness())
            assert (await refused(call)).code() is grpc.StatusCode.UNAVAILABLE
        worker.pause_at = None
        assert len([message async for message in reading]) > 2


async def test_clients_without_a_handshake_count_and_end(
    router: StartRouter, certificates: ClientCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend, "HANDSHAKE_TIMEOUT_S", 3)
    config = replace(
        FAST_ROUTER, grpc_port=0, tls=str(certificates.folder), max_requests=2,
        connections_per_request=1,
    )  # fmt: skip
    async with router(config=config, trust=certificates.trusting()) as running:
        host, port = running.grpc_address.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        async with channel_to(running, certificates) as channel:
            stub = client_pb2_grpc.InferenceStub(channel)
            surplus = await refused(stub.Generate(ASKED, timeout=20 * slowness()))
            assert surplus.code() is grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(20 * slowness()):
            for reader, writer in silent:
                await reader.read()
                writer.close()
        assert await answered(running, certificates) > 0
