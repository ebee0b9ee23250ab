"""The Redis server of the rows on three hosts: flushed, without memory, paused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError
from redis.retry import Retry

from baton.deploy.host.stored_authority import Request, create_authority, issue
from chaos.redis_server import RedisServer, running_server
from tests.support.redis_server import required_binary, required_tls_binary

PASSWORD = "a password"
PAUSE_S = 0.3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path, required_binary(), "--requirepass", PASSWORD)
    made.start()
    yield made
    made.kill()


@pytest.fixture
def client(server: RedisServer) -> Iterator[Redis]:
    with Redis(host="127.0.0.1", port=server.port, password=PASSWORD) as made:
        yield made


def test_a_flush_deletes_all_and_counts_it(server: RedisServer, client: Redis) -> None:
    client.set("key", "value")
    assert (server.flush(), client.get("key"), server.flush()) == (1, None, 0)


def test_without_memory_it_stores_nothing_and_still_reads(
    server: RedisServer, client: Redis
) -> None:
    client.set("key", "value")
    server.limit_memory(1)
    with pytest.raises(OutOfMemoryError):
        client.set("other", "value")
    assert client.get("key") == b"value"
    server.limit_memory(0)
    client.set("other", "value")


def test_a_server_with_tls_is_reached_by_tls_alone(tmp_path: Path) -> None:
    create_authority(tmp_path / "authority", 10)
    host = Request("redis", ("127.0.0.1",), 10)
    files = issue(tmp_path / "authority", tmp_path / "tls", host)
    with running_server(tmp_path, required_tls_binary(), tls=files) as server:
        assert server.url.startswith("rediss://")
        assert server.flush() == 0
        plain = Redis(host="127.0.0.1", port=server.port, retry=Retry(NoBackoff(), 0))
        with plain, pytest.raises(RedisConnectionError):
            plain.ping()


def test_a_stopped_server_answers_once_it_runs_again(server: RedisServer) -> None:
    server.pause()
    threading.Timer(PAUSE_S, server.resume).start()
    assert server.ping_s() >= 0.9 * PAUSE_S
