"""`baton bench` reads answers: events of a stream, bytes of a connection, times of chunks."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.deploy.bench.answer import AnswerReader, Measurement
from baton.deploy.bench.event_stream import EventStream
from baton.deploy.bench.http_client import Connection, ExchangeFailed, HttpClient, ServerAddress
from baton.planner.traces import TraceRequest
from baton.runtime.errors import ConfigError
from tests.support.json_values import Json

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"


class WrittenTransport(asyncio.Transport):
    """Keeps what is written, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def abort(self) -> None:
        self.closed = True


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def measurement(intended_s: float = 100.0) -> Measurement:
    return Measurement(TraceRequest(0.0, 10, 4), False, intended_s)


def chunk(**choice: Json) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


# -- events -----------------------------------------------------------------------------------

EVENTS = [b"one", b"two\nlines", b"", b"[DONE]"]
STREAM = b": a comment\n\ndata: one\n\nevent: x\ndata: two\ndata:lines\nid: 3\n\n"
STREAM += b"data\n\n\ndata:[DONE]\n\n"


@given(
    st.lists(st.integers(0, 2 * len(STREAM)), max_size=12), st.sampled_from([b"\n", b"\r\n", b"\r"])
)
def test_events_are_the_same_in_any_pieces(cuts: list[int], line_end: bytes) -> None:
    text = b"\xef\xbb\xbf" + STREAM.replace(b"\n", line_end)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts if cut >= 3), len(text)]
    stream, found = EventStream(), []
    for first, end in zip(edges, edges[1:], strict=False):
        found += stream.feed(text[first:end])
    assert found == EVENTS


def test_an_event_without_its_empty_line_is_not_complete() -> None:
    stream = EventStream()
    assert stream.feed(b"data: a\n") == []
    assert stream.feed(b"\ndata: b") == [b"a"]


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.deploy.bench.event_stream.MAX_EVENT_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        EventStream().feed(b"data: " + b"x" * 200)


# -- connections ------------------------------------------------------------------------------


async def test_times_are_exactly_those_at_which_bytes_were_read() -> None:
    clock, transport, found = ManualClock(), WrittenTransport(), measurement(99.5)
    connection = Connection(clock)
    connection.connection_made(transport)
    reader = AnswerReader(found, stream=True)
    exchange = asyncio.create_task(connection.exchange(b"POST", reader))
    await asyncio.sleep(0)
    opening = chunk(delta={"role": "assistant", "content": ""})
    pieces = [
        (100.25, HEAD + b"Content-Length: %d\r\n\r\n"),
        (100.5, opening),
        (101.0, chunk(delta={"content": "a"})),
        (101.125, chunk(delta={"content": "b"}) + chunk(delta={"reasoning_content": "c"})),
        (103.0, chunk(delta={"content": "d"}, finish_reason="stop")),
        (103.5, b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}\n\n'),
        (104.0, b"data: [DONE]\n\n"),
    ]
    length = sum(len(data) for _, data in pieces[1:])
    for now_s, data in pieces:
        clock.now_s = now_s
        connection.data_received(data % length if b"%d" in data else data)
    await exchange
    reader.finish(clock.now_s)
    assert (transport.written, connection.reusable, found.error) == (b"POST", True, None)
    assert (found.ttft_s, found.e2e_s) == (1.5, 4.5)
    assert list(found.gaps_s) == [0.125, 0.0, 1.875]
    assert (found.prompt_tokens, found.output_tokens) == (9, 4)
    assert found.mean_gap_s == 2.0 / 3


async def answered(*pieces: bytes, closed: bool = False) -> tuple[Connection, Measurement]:
    found, connection = measurement(), Connection(ManualClock())
    connection.connection_made(WrittenTransport())
    reader = AnswerReader(found, stream=True)
    exchange = asyncio.create_task(connection.exchange(b"POST", reader))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
    if closed:
        connection.connection_lost(None)
    try:
        await exchange
        reader.finish(100.0)
    except ExchangeFailed as error:
        found.fail(error.reason, str(error))
    return connection, found


TEXT = chunk(delta={"content": "a"})
FINISH = chunk(delta={}, finish_reason="stop")


def whole(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    ("answer", "closed", "error", "words"),
    [
        (whole(TEXT + FINISH), False, None, ""),
        (whole(TEXT + b"data: [DONE]\n\n"), False, None, ""),
        (HEAD + b"\r\n" + TEXT + FINISH, True, None, ""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + whole(TEXT + FINISH), False, None, ""),
        (whole(TEXT), False, "broken", "without a finish reason"),
        (HEAD + b"\r\n" + TEXT, True, "broken", "without a finish reason"),
        (HEAD + b"Content-Length: 9999\r\n\r\n" + TEXT, True, "broken", "closed the connection"),
        (b"", True, "broken", "closed the connection"),
        (b"SSH-2.0-OpenSSH_9\r\n", False, "malformed", "not HTTP"),
        (whole(b"data: {1}\n\n"), False, "malformed", "not JSON"),
        (whole(b"data: 3\n\n"), False, "malformed", "not an object"),
        (whole(b'data: {"choices": [3]}\n\n'), False, "malformed", "not JSON of the API"),
        (whole(b'data: {"error": {"message": "full"}}\n\n'), False, "error event", "full"),
        (whole(FINISH), False, "empty", "no text"),
        (whole(b"{}", b"HTTP/1.1 200 OK\r\n"), False, "malformed", "does not stream"),
        (whole(b"<h1>no\x07</h1>", b"HTTP/1.1 502 -\r\n"), False, "http 502", "<h1>no </h1>"),
        (
            whole(b'{"error":{"message":"slow down"}}', b"HTTP/1.1 429 -\r\nRetry-After: 2\r\n"),
            False, "http 429", "slow down",
        ),
    ],
)  # fmt: skip
async def test_each_kind_of_answer_is_named(
    answer: bytes, closed: bool, error: str | None, words: str
) -> None:
    _, found = await answered(answer, closed=closed)
    assert found.error == error and words in found.message
    assert found.retry_after_s == (2.0 if error == "http 429" else None)


async def test_a_connection_is_kept_only_after_a_delimited_answer() -> None:
    kept, _ = await answered(whole(TEXT + FINISH))
    assert kept.reusable
    closed, _ = await answered(whole(TEXT + FINISH, HEAD + b"Connection: close\r\n"))
    assert not closed.reusable
    kept.data_received(b"more")  # bytes that no request asked for
    assert not kept.reusable


async def test_a_kept_connection_that_closes_gives_no_answer() -> None:
    connection, _ = await answered(whole(TEXT + FINISH))
    exchange = asyncio.create_task(
        connection.exchange(b"POST", AnswerReader(measurement(), stream=True))
    )
    await asyncio.sleep(0)
    connection.connection_lost(None)
    with pytest.raises(ExchangeFailed) as failed:
        await exchange
    assert failed.value.reason == "broken" and not connection.answering


async def test_a_request_on_a_stale_connection_is_sent_once_more() -> None:
    """The server closes each kept connection as soon as its second request arrives."""
    connections: list[int] = []
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # the client closed it
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(2)
                connections[-1] += 1
                if connections[-1] == 2:
                    break
                writer.write(whole(TEXT + FINISH))
        writer.close()
        if len(connections) == 3:
            ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = HttpClient(ServerAddress.parse(url, None), ManualClock())
    for _ in range(3):
        found = measurement()
        reader = AnswerReader(found, stream=True)
        await client.post("/", b"{}", reader)
        reader.finish(0.0)
        assert found.error is None
    assert connections == [2, 2, 1]
    client.close()
    await ended.wait()
    server.close()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"choices":[{"message":{}}],"usage":{"prompt_tokens":3,"completion_tokens":5}}', None),
        (b'{"choices":[]}', "malformed"),
        (b"[]", "malformed"),
        (b"<html>", "malformed"),
    ],
)
def test_a_whole_answer_has_its_usage_and_no_first_token(body: bytes, error: str | None) -> None:
    found = measurement()
    reader = AnswerReader(found, stream=False)
    reader.head(200, {b"content-type": b"application/json"})
    reader.body(body, 101.0)
    reader.finish(102.0)
    assert (found.error, found.chunks, found.e2e_s) == (error, 0, 2.0)
    assert found.output_tokens == (5 if error is None else None)


# -- addresses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "host", "port", "tls"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, False),
        ("http://127.0.0.1:8000/v1/", "127.0.0.1", 8000, False),
        ("https://example.test", "example.test", 443, True),
        ("http://[::1]:81", "::1", 81, False),
    ],
)
def test_an_address_is_the_root_of_a_server(url: str, host: str, port: int, tls: bool) -> None:
    found = ServerAddress.parse(url, "secret")
    assert (found.host, found.port, found.tls) == (host, port, tls)
    assert b"Authorization: Bearer secret\r\n" in found.headers


@pytest.mark.parametrize(
    "url",
    ["nowhere", "ftp://x", "http://[::1", "http://h:0", "http://h:x", "http://h/api", "http://h?x"],
)
def test_an_impossible_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="write it as|give the server's root"):
        ServerAddress.parse(url, None)


def test_a_key_that_no_header_carries_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerAddress.parse("http://h", "ge\nheim")
    assert "heim" not in str(caught.value)
