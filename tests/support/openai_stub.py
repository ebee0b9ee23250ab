"""A server of the OpenAI API whose timing and faults are a test's script, in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MODELS = {"object": "list", "data": [{"id": "stub", "object": "model"}]}
PROBE_TOKENS = 1  # the length of an output that asks for the length of its prompt
OVERHEAD_TOKENS = 7  # of a prompt, beside two tokens for each word


@dataclass(frozen=True, slots=True)
class Script:
    """One answer. `break_after`: the connection ends after so many chunks. `plain`: a body that is
    sent with `status` instead of a stream. `usage`: the answer reports its tokens."""

    ttft_s: float = 0.0
    gap_s: float = 0.0
    status: int = 200
    plain: bytes | None = None
    headers: tuple[str, ...] = ()
    break_after: int | None = None
    usage: bool = True
    event: str | None = None  # sent instead of the second chunk


@dataclass(slots=True)
class Received:
    """One request, and when (time.monotonic) it came and each of its chunks was written."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at_s: float
    written_s: list[float] = field(default_factory=list)


Scripted = Callable[[int, dict[str, Any]], Script]


class OpenAiStub:
    """`received` has all but the requests that measure prompts. `script` gets the number of such a
    request, from 0, and its body."""

    def __init__(self, script: Scripted) -> None:
        self.received: list[Received] = []
        self.probes = 0
        self.url = ""
        self._script = script

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if not await self._answer(head.decode(), reader, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()

    async def _answer(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        first, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        content = await _body(headers, reader)
        if not first.startswith("POST"):  # HEAD has no body
            listed = json.dumps(MODELS).encode() if first.startswith("GET") else b""
            _write_plain(writer, 200, listed)
            return True
        body = json.loads(content)
        body.setdefault("max_tokens", body.get("max_completion_tokens"))
        if body["max_tokens"] == PROBE_TOKENS:
            self.probes += 1
            return await self._stream(Script(), Received("", headers, body, 0.0), writer)
        received = Received(first.split()[1], headers, body, time.monotonic())
        script = self._script(len(self.received), body)
        self.received.append(received)
        if script.plain is not None:
            await asyncio.sleep(script.ttft_s)  # The script sets this delay.
            _write_plain(writer, script.status, script.plain, script.headers)
            return True
        if not body.get("stream"):
            await asyncio.sleep(script.ttft_s)  # The script sets this delay.
            whole = {"choices": [{"index": 0, "message": {"content": "x"}}], **_usage(body)}
            _write_plain(writer, 200, json.dumps(whole).encode())
            return True
        return await self._stream(script, received, writer)

    async def _stream(
        self, script: Script, received: Received, writer: asyncio.StreamWriter
    ) -> bool:
        body = received.body
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        if "messages" in body:
            _write_event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        due_s = time.monotonic()
        for token in range(body["max_tokens"]):
            if token == script.break_after:
                return False
            due_s += script.gap_s if token else script.ttft_s
            # The script sets when a token is due.
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            received.written_s.append(time.monotonic())
            if token == 1 and script.event is not None:
                _write_chunk(writer, f"data: {script.event}\n\n".encode())
            else:
                _write_event(writer, {"choices": [_choice(body, "x")]})
        finish = {"index": 0, "delta": {}, "text": "", "finish_reason": "length"}
        _write_event(writer, {"choices": [finish]})
        if script.usage:
            _write_event(writer, {"choices": [], **_usage(body)})
        _write_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True


@contextmanager
def openai_stub(script: Scripted = lambda number, body: Script()) -> Iterator[OpenAiStub]:
    """Run a stub until the block ends."""
    stub, started, loop = OpenAiStub(script), threading.Event(), asyncio.new_event_loop()
    ended = asyncio.Event()

    async def main() -> None:
        server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await ended.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)


async def _body(headers: dict[str, str], reader: asyncio.StreamReader) -> bytes:
    if "chunked" not in headers.get("transfer-encoding", ""):
        return await reader.readexactly(int(headers.get("content-length", 0)))
    content = b""
    while length := int(await reader.readuntil(b"\r\n"), 16):
        content += (await reader.readexactly(length + 2))[:-2]
    await reader.readexactly(2)
    return content


def _choice(body: dict[str, Any], text: str) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}} if "messages" in body else {"text": text}


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    tokens = len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split()) + OVERHEAD_TOKENS
    return {"usage": {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}}


def _write_plain(
    writer: asyncio.StreamWriter, status: int, body: bytes, headers: tuple[str, ...] = ()
) -> None:
    lines = [f"HTTP/1.1 {status} -", f"Content-Length: {len(body)}", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)


def _write_event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    content = {"id": "1", "object": "chat.completion.chunk", "model": "stub"} | content
    _write_chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
