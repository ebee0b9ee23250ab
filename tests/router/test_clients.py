"""Clients as they are: the official openai client, ones that leave, ones that do not read."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace

import httpx
import openai
import pytest

from baton.router import server
from baton.router.answers.choice_text import ChoiceDelta, ChoiceText
from baton.router.dispatch.active_request import OutputToken
from baton.runtime.config import RouterConfig
from baton.runtime.identity import tenant_of
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartRouter
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed


async def test_openai_async_client(router: StartRouter) -> None:
    async with (
        router() as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client,
    ):
        asked: JsonObject = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "seed": 1,
            "max_completion_tokens": 12,
            "logprobs": True,
            "top_logprobs": 3,
        }
        whole = await client.chat.completions.create(**asked)
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        entries = logprobs.content
        assert len(entries) == 12 and len(entries[0].top_logprobs) == 3
        assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode(errors="replace") == (
            whole.choices[0].message.content
        )
        text = ""
        stream = await client.chat.completions.create(**asked, stream=True)
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text == whole.choices[0].message.content
        models = await client.models.list()
        assert [model.id for model in models.data] == ["tiny"]


async def test_openai_sync_client(router: StartRouter) -> None:
    def ask(url: str) -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            whole = client.completions.create(
                model="tiny", prompt="the quick", seed=3, max_tokens=9, logprobs=1
            )
            parts = client.completions.create(
                model="tiny", prompt="the quick", seed=3, max_tokens=9, stream=True
            )
            return whole.choices[0].text, "".join(part.choices[0].text for part in parts)

    async with router() as running:
        whole, parts = await asyncio.to_thread(ask, running.url)
        assert whole == parts != ""


async def test_openai_client_sees_errors_as_its_own(router: StartRouter) -> None:
    async with (
        router() as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.NotFoundError, match="tiny"):
            await client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="tiny", prompt="a", temperature=9)
        assert refused.value.param == "temperature"
        running.workers["decode-0"].step_s = 0.01
        running.workers["decode-0"].fail_at = {3: ("EngineError", False)}
        with pytest.raises(openai.APIError):
            async for _ in await client.completions.create(model="tiny", prompt="a", stream=True):
                pass


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_worker(router: StartRouter, stream: bool) -> None:
    async with router() as running:
        worker = running.workers["decode-0"]
        worker.pause_at = 3
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            body = {"model": "tiny", "prompt": "a", "max_tokens": 50, "stream": stream}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await eventually(lambda: bool(worker.held))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: not worker.held)
        (submit,) = worker.seen("submit")
        (cancel,) = worker.seen("cancel")
        assert cancel.request_id == submit.request_id and cancel.attempt == 1


async def test_a_client_that_leaves_while_no_worker_is_there(router: StartRouter) -> None:
    async with router() as running:
        worker = running.workers["decode-0"]
        worker.draining = True
        ready = running.http.get

        async def unready() -> bool:
            return bool((await ready("/readyz")).status_code == 503)

        await eventually(unready)
        body = {"model": "tiny", "prompt": "a"}
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            # The request has to wait for a worker when its client leaves.
            await asyncio.sleep(0.2 * slowness())
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        # The router may count no request of a client that has left.
        await asyncio.sleep(0.1 * slowness())
        worker.draining = False
        await running.ready()
        assert (await running.complete(max_tokens=1)).status_code == 200
        assert len(worker.seen("submit")) == 1


async def test_a_slow_client_is_cancelled_and_others_are_not(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = server.bind

    def bind_small(host: str, port: int, backlog: int) -> socket.socket:
        """Connections send into a short buffer of the kernel's, not megabytes of it first."""
        listener = bind(host, port, backlog)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(server, "bind", bind_small)
    config = replace(FAST_ROUTER, stream_buffer_messages=64)
    async with router(config=config) as running:
        host, port = running.url.removeprefix("http://").split(":")
        loop, client = asyncio.get_running_loop(), socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, (host, int(port)))
        body = b'{"model":"tiny","prompt":"a","max_tokens":4000,"n":16,"stream":true,"logprobs":5}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        await loop.sock_sendall(client, head % len(body) + body)
        worker = running.workers["decode-0"]
        await eventually(lambda: bool(worker.seen("submit")))
        other = await running.complete(max_tokens=30)
        assert other.status_code == 200
        await eventually(lambda: len(worker.seen("cancel")) == 1, limit_s=100 * slowness())
        assert (await running.complete(max_tokens=3)).status_code == 200
        client.close()


async def test_admission_is_bounded(router: StartRouter) -> None:
    async with router(config=replace(FAST_ROUTER, max_requests=2)) as running:
        worker = running.workers["decode-0"]
        worker.pause_at = 1
        held = [asyncio.create_task(running.complete()) for _ in range(2)]
        await eventually(lambda: len(worker.held) == 2)
        refused = await running.complete()
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert await refused_without_a_body(running.url) < 10  # not after the sixty of a body
        worker.pause_at = None
        assert [reply.status_code for reply in await asyncio.gather(*held)] == [200, 200]
        assert (await running.complete()).status_code == 200


async def refused_without_a_body(url: str) -> float:
    """Announce a request and send nothing of it; the seconds until it is refused."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    started_s = asyncio.get_running_loop().time()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
    )
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
    took_s = asyncio.get_running_loop().time() - started_s
    writer.close()
    assert b" 503 " in head.splitlines()[0] and b"retry-after: " in head.lower()
    return took_s


async def test_many_requests_at_once(router: StartRouter) -> None:
    async with router(workers=("decode-0", "decode-1", "prefill-0")) as running:
        alone = (await running.complete(seed=11, max_tokens=20)).json()["choices"]
        replies = await asyncio.gather(
            *(running.complete(seed=11, max_tokens=20) for _ in range(48))
        )
        assert all(reply.json()["choices"] == alone for reply in replies)


async def test_keys(router: StartRouter) -> None:
    async with router(config=replace(FAST_ROUTER, api_keys=("k1", "k2"))) as running:
        assert (await running.complete()).status_code == 401
        for given, status in (("Bearer k2", 200), ("Bearer k3", 401), ("k1", 401), ("é", 401)):
            reply = await running.http.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": "a"},
                headers={"authorization": given.encode()},
            )
            assert reply.status_code == status, given
        assert (await running.http.get("/v1/models")).status_code == 401
        assert (await running.http.get("/livez")).status_code == 200


async def test_each_key_has_prefixes_of_its_own(router: StartRouter) -> None:
    """What one key has cached, another neither finds nor can name, unless prefixes are shared."""

    async def salts(config: RouterConfig, *asked: tuple[str, str | None]) -> list[bytes]:
        async with router(config=config) as running:
            for key, salt in asked:
                reply = await running.http.post(
                    "/v1/completions",
                    json={"model": "tiny", "prompt": "a", "max_tokens": 1, "cache_salt": salt},
                    headers={"authorization": f"Bearer {key}"},
                )
                assert reply.status_code == 200
            sent = running.workers["decode-0"].seen("submit")
            return [submit.cache_salt for submit in sent]

    keys = replace(FAST_ROUTER, api_keys=("k1", "k2"))
    asked = [("k1", None), ("k1", None), ("k2", None), ("k1", "s"), ("k2", "s")]
    plain, again, other, salted, other_salted = await salts(keys, *asked)
    assert plain == again and len({plain, other, salted, other_salted}) == 4
    assert {len(salt) for salt in (plain, other, salted, other_salted)} == {32}
    assert tenant_of(plain) == tenant_of(salted) != tenant_of(other) == tenant_of(other_salted)
    forged = await salts(keys, ("k2", plain.hex()), ("k2", plain.decode("latin-1")))
    assert plain not in forged
    shared = replace(keys, shared_prefixes=True)
    plain, other, salted, other_salted = await salts(shared, asked[0], *asked[2:])
    assert plain == other == b"" and salted == other_salted != b""
    assert tenant_of(plain) == tenant_of(salted)


async def test_stopping_lets_open_requests_end(router: StartRouter) -> None:
    async with router() as running:
        running.workers["decode-0"].step_s = 0.02
        asking = asyncio.create_task(running.complete(max_tokens=30))
        await eventually(lambda: running.workers["decode-0"].held)
        running.serving.cancel()
        assert (await asking).status_code == 200


async def test_readiness_goes_off_before_the_port_closes(router: StartRouter) -> None:
    """A balancer needs a while to hear of it; a router that gets two signals waits for none."""
    async with router(config=replace(FAST_ROUTER, leave_s=60.0)) as running:
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: not_ready(running))
        assert (await running.complete(max_tokens=2)).status_code == 200
        assert not running.serving.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running.serving, 20 * slowness())
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient(base_url=running.url).get("/livez")


async def test_a_router_without_open_requests_ends_at_once(
    router: StartRouter,
) -> None:
    """Ctrl-C on a laptop: connections that only stay open are no reason to wait."""
    async with router(config=replace(FAST_ROUTER, drain_s=3600.0)) as running:
        assert (await running.complete(max_tokens=2)).status_code == 200  # and kept alive
        host, port = running.url.removeprefix("http://").split(":")
        _, silent = await asyncio.open_connection(host, int(port))
        _, begun = await asyncio.open_connection(host, int(port))
        begun.write(b"GET /readyz HTTP/1.1\r\nhost:")
        # The router has to hold a connection with the beginning of a head.
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running.serving, 5 * slowness())
        for writer in (silent, begun):
            writer.close()


async def test_a_second_signal_tells_streams_and_ends_at_once(router: StartRouter) -> None:
    async with router(config=replace(FAST_ROUTER, drain_s=3600.0)) as running:
        running.workers["decode-0"].step_s = 0.05
        long = {"max_tokens": 2000, "ignore_eos": True}
        whole = asyncio.create_task(running.complete(**long))
        stream = asyncio.create_task(running.complete(stream=True, **long))
        await eventually(lambda: len(running.workers["decode-0"].held) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        # Nothing may end in this time after the first signal.
        await asyncio.sleep(0.5)
        assert not (whole.done() or stream.done() or running.serving.done())
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(running.serving, 10 * slowness())
        text = (await stream).text
        assert "the router stops" in text and text.endswith("data: [DONE]\n\n")
        assert (await whole).status_code == 503
        await eventually(lambda: not running.workers["decode-0"].held)


async def test_an_endless_upload_does_not_outlast_a_second_signal(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.router.server.LAST_EVENT_S", 0.3)
    async with router(config=replace(FAST_ROUTER, drain_s=3600.0)) as running:
        host, port = running.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"
        writer.write(head)
        # The router has to wait for the body when the signal comes.
        await asyncio.sleep(0.2 * slowness())
        os.kill(os.getpid(), signal.SIGTERM)
        # Nothing may end in this time after the first signal.
        await asyncio.sleep(0.5)
        assert not running.serving.done()  # it is open, and may come
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running.serving, 10 * slowness())
        writer.close()


async def not_ready(running: RunningRouter) -> bool:
    return bool((await running.http.get("/readyz")).status_code == 503)


async def test_stopping_tells_streams_that_do_not_end_in_time(router: StartRouter) -> None:
    async with router(config=replace(FAST_ROUTER, drain_s=0.3)) as running:
        running.workers["decode-0"].step_s = 0.05
        long = {"max_tokens": 2000, "ignore_eos": True}
        whole = asyncio.create_task(running.complete(**long))
        stream = asyncio.create_task(running.complete(stream=True, **long))
        await eventually(lambda: len(running.workers["decode-0"].held) == 2)
        held = running.workers["decode-0"].held.values()
        await eventually(lambda: all(len(each.outputs) > 4 for each in held))
        running.serving.cancel()
        text = (await stream).text
        assert '"finish_reason":"error"' in text and "event: error" in text
        assert "the router stops" in text and text.endswith("data: [DONE]\n\n")
        refused = await whole
        assert refused.status_code == 503 and refused.headers["retry-after"]
        await eventually(lambda: not running.workers["decode-0"].held)


async def test_a_bug_in_the_middle_of_a_stream_ends_it_aloud(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, calls = ChoiceText.push, iter(range(100))

    def broken(text: ChoiceText, outputs: Sequence[OutputToken]) -> ChoiceDelta:
        if next(calls) == 2:
            raise RuntimeError("a secret of the inside")
        return push(text, outputs)

    monkeypatch.setattr(ChoiceText, "push", broken)
    async with router() as running:
        running.workers["decode-0"].step_s = 0.02
        reply = await running.complete(max_tokens=30, stream=True, ignore_eos=True)
        assert '"finish_reason":"error"' in reply.text and "internal_error" in reply.text
        assert reply.text.endswith("data: [DONE]\n\n") and "secret" not in reply.text


async def test_texts_to_tokenize_are_bounded_as_requests_are(router: StartRouter) -> None:
    async with router(config=replace(FAST_ROUTER, max_requests=1)) as running:
        host, port = running.url.removeprefix("http://").split(":")
        for path in ("/tokenize", "/detokenize"):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
            writer.write(head.encode())  # and nothing of its body
            # The router has to wait for the body when the next request comes.
            await asyncio.sleep(0.1 * slowness())
            reply = await running.http.post("/tokenize", json={"prompt": "a"})
            assert reply.status_code == 200
            async with asyncio.timeout(20):
                assert b" 503 " in await reader.readline()  # it has made room
            writer.close()
            await writer.wait_closed()


async def test_a_text_to_tokenize_has_a_deadline(router: StartRouter) -> None:
    async with router() as running:
        reply = await running.http.post(
            "/tokenize", json={"prompt": "a"}, headers={"X-Request-Deadline": "soon"}
        )
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "X-Request-Deadline"
