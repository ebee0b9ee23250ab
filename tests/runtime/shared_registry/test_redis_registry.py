"""The registry on a real Redis server: members, outages, and entries that must not count."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from baton.runtime import metrics
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import RegistryClient, RegistryUnavailable
from baton.runtime.shared_registry import redis_registry
from baton.runtime.shared_registry.registry_location import open_registry
from baton.runtime.shared_registry.signed_entry import MAX_ENTRY_BYTES, EntrySigner, SignedEntry
from chaos.redis_server import RedisServer, running_server, server_binaries
from tests.runtime.shared_registry.conftest import ONE, TOKEN, TWO, OpenRegistry
from tests.support.machine_speed import slowness
from tests.support.metric_values import metric_value
from tests.support.redis_server import required_binary
from tests.support.waiting import eventually

LIMIT_S = 30.0
LIFETIME_S = 0.5 * slowness()  # within which a processor has to read an entry
CHANNEL = "baton:baton:entries"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_registry, "FULL_READ_S", 0.1)
    monkeypatch.setattr(redis_registry, "RECONNECT_S", (0.02, 0.05))


@pytest.fixture
async def raw(server: RedisServer) -> AsyncIterator[Redis]:
    """The server as a process without the cluster's token uses it."""
    client = Redis.from_url(server.url)
    yield client
    await client.aclose()


async def become(registry: RegistryClient, expected: list[WorkerRecord]) -> None:
    """Wait until the registry lists these records."""

    async def listed() -> bool:
        return await registry.workers() == expected

    await eventually(listed)


async def announced(registry: RegistryClient, record: WorkerRecord) -> None:
    """Announce until that works, as a worker does."""

    async def works() -> bool:
        with contextlib.suppress(RegistryUnavailable):
            await registry.announce(record)
            return True
        return False

    await eventually(works, every_s=0.05)


def key_of(record: WorkerRecord) -> str:
    digest = redis_registry.blake2b(record.worker_id.encode(), digest_size=8).hexdigest()
    return f"baton:baton:{digest}:{record.boot_id}"


def signed(record: WorkerRecord, counter: int, token: str = TOKEN, started: int = 1) -> bytes:
    return EntrySigner((token,)).write(SignedEntry(record, started, counter))


async def test_members_are_listed_by_every_reader(open_client: OpenRegistry) -> None:
    one, two = open_client(), open_client()
    assert await one.workers() == []
    await one.announce(ONE)
    await two.announce(TWO)
    for reader in (one, two, open_client()):
        await become(reader, [ONE, TWO])


async def test_every_kind_of_server_lists_members(tmp_path: Path) -> None:
    """All tests with the fixture `server` run on each kind in `make nightly`."""
    required_binary()
    for number, binary in enumerate(server_binaries()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with running_server(folder, binary) as server:
            config = RegistryConfig(location=server.url)
            client = open_registry(config, SecurityConfig(tls="off"), (TOKEN,))
            try:
                await client.announce(ONE)
                await become(client, [ONE])
            finally:
                await client.close()


async def test_a_notification_lists_a_member_before_any_full_read(
    open_client: OpenRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_registry, "FULL_READ_S", 3600.0)
    reader = open_client()
    assert await reader.workers() == []
    await open_client().announce(ONE)
    await become(reader, [ONE])


async def test_a_full_read_finds_what_no_notification_named(
    open_client: OpenRegistry, raw: Redis
) -> None:
    reader = open_client()
    assert await reader.workers() == []
    await raw.set(key_of(ONE), signed(ONE, 1))
    await become(reader, [ONE])


async def test_a_withdrawn_member_is_no_longer_listed(open_client: OpenRegistry) -> None:
    worker, reader = open_client(), open_client()
    await worker.announce(ONE)
    await become(reader, [ONE])
    await worker.withdraw(ONE.worker_id, TWO.boot_id)  # of another boot
    await become(reader, [ONE])
    await worker.withdraw(ONE.worker_id, ONE.boot_id)
    await become(reader, [])


async def test_the_newest_boot_of_a_worker_comes_last(open_client: OpenRegistry) -> None:
    again = replace(ONE, boot_id="c" * 32, address="10.0.0.9:1")
    older, newer = open_client(), open_client()
    await older.announce(ONE)
    await newer.announce(again)
    await older.announce(ONE)  # it is not dead yet
    await become(newer, [ONE, again])


async def test_a_deleted_entry_hides_no_member(open_client: OpenRegistry, raw: Redis) -> None:
    worker, reader = open_client(), open_client()
    await worker.announce(ONE)
    await become(reader, [ONE])
    await raw.flushall()
    await asyncio.sleep(0.3)  # some full reads
    assert await reader.workers() == [ONE]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff" * 20,
        b"1" * (MAX_ENTRY_BYTES + 5),
        b"[" * 5000,
        signed(TWO, 1, token="another"),
        signed(TWO, 1).replace(b"10.0.0.2", b"10.6.6.6"),
        signed(TWO, 1).replace(b'"counter": 1', b'"counter": 2'),
    ],
)
async def test_an_entry_without_a_valid_signature_adds_no_member(
    content: bytes, open_client: OpenRegistry, raw: Redis
) -> None:
    reader = open_client()
    await raw.set(key_of(TWO), content)
    await open_client().announce(ONE)
    await become(reader, [ONE])
    await raw.publish(CHANNEL, content)
    # The reader has to see the published content, which may change nothing.
    await asyncio.sleep(0.3)
    assert await reader.workers() == [ONE]
    assert (key_of(TWO) in reader.faults()) == bool(content)


async def test_foreign_entries_hide_no_member(open_client: OpenRegistry, raw: Redis) -> None:
    forged = replace(ONE, address="10.6.6.6:1")
    worker, reader = open_client(), open_client()
    await worker.announce(ONE)
    await become(reader, [ONE])
    await raw.set(key_of(ONE), signed(forged, 1 << 62, token="another"))
    await raw.publish(CHANNEL, signed(forged, 1 << 62, token="another"))
    await raw.lpush("baton:baton:" + "0" * 16 + ":" + "0" * 32, "a list")
    # The reader has to see the forged entries, which may change nothing.
    await asyncio.sleep(0.3)
    assert await reader.workers() == [ONE]


async def test_a_replayed_entry_keeps_no_dead_member_listed(
    open_client: OpenRegistry, raw: Redis
) -> None:
    reader = open_client(lifetime_s=LIFETIME_S)
    old = signed(ONE, 7)
    await raw.set(key_of(ONE), old)
    await become(reader, [ONE])

    async def replay() -> None:
        while True:
            await raw.set(key_of(ONE), old)
            await raw.publish(CHANNEL, old)
            # The attacker repeats the old entry at this period.
            await asyncio.sleep(0.02)

    replaying = asyncio.create_task(replay())
    await become(reader, [])
    await asyncio.sleep(0.3)  # nor is it listed again
    assert await reader.workers() == []
    replaying.cancel()


async def test_a_replay_of_an_earlier_boot_hides_no_newer_one(
    open_client: OpenRegistry, raw: Redis
) -> None:
    earlier = replace(ONE, boot_id="e" * 32, address="10.0.0.9:1")
    worker, reader = open_client(), open_client()
    await worker.announce(ONE)
    await become(reader, [ONE])
    await raw.set(key_of(earlier), signed(earlier, 1 << 62))
    await become(reader, [earlier, ONE])  # the last one of a worker counts


async def test_an_outage_leaves_known_members_and_is_reported_once(
    server: RedisServer, open_client: OpenRegistry
) -> None:
    worker, reader = open_client(lifetime_s=LIFETIME_S), open_client(lifetime_s=LIFETIME_S)
    await worker.announce(ONE)
    await become(reader, [ONE])
    with capture_logs() as logs:
        server.kill()
        with pytest.raises(RegistryUnavailable):
            await worker.announce(ONE)
        await eventually(lambda: metric_value(metrics.REGISTRY_UP) == 0)
        await asyncio.sleep(2 * LIFETIME_S)  # longer than an entry lives
        assert await reader.workers() == [ONE]
        server.start()  # empty
        await announced(worker, ONE)
        await become(reader, [ONE])
        await eventually(lambda: len(logs) == 4)
    assert sorted(line["event"] for line in logs) == [
        "registry available again",
        "registry available again",
        "registry unavailable",
        "registry unavailable",
    ]  # once for each of the two processes
    assert metric_value(metrics.REGISTRY_UP) == 1


async def test_a_reader_that_starts_in_an_outage_fails_until_it_ends(
    server: RedisServer, open_client: OpenRegistry
) -> None:
    server.kill()
    reader = open_client()
    with pytest.raises(RegistryUnavailable):
        await reader.workers()
    server.start()
    worker = open_client()
    await worker.announce(ONE)

    async def listed() -> bool:
        with contextlib.suppress(RegistryUnavailable):
            return await reader.workers() == [ONE]
        return False

    await eventually(listed)


async def test_a_paused_server_holds_up_no_caller_for_ever(
    server: RedisServer, open_client: OpenRegistry
) -> None:
    worker, reader = open_client(), open_client()
    await worker.announce(ONE)
    await become(reader, [ONE])
    server.pause()
    try:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(RegistryUnavailable):
                await worker.announce(ONE)
        assert await reader.workers() == [ONE]
    finally:
        server.resume()
    await worker.announce(ONE)
    await become(reader, [ONE])


async def test_a_full_server_still_carries_announcements(
    open_client: OpenRegistry, raw: Redis
) -> None:
    reader = open_client()
    assert await reader.workers() == []
    await raw.config_set("maxmemory-policy", "noeviction")
    await raw.config_set("maxmemory", "1")
    worker = open_client()
    with pytest.raises(RegistryUnavailable, match="OutOfMemory|OOM|maxmemory"):
        await worker.announce(ONE)
    await become(reader, [ONE])
    await raw.config_set("maxmemory", "0")
    await worker.announce(ONE)
    assert await raw.exists(key_of(ONE)) == 1


async def test_an_entry_ends_on_the_server_with_its_lifetime(
    open_client: OpenRegistry, raw: Redis
) -> None:
    await open_client(lifetime_s=0.2).announce(ONE)

    async def ended() -> bool:
        return not await raw.exists(key_of(ONE))

    await eventually(ended)


async def test_two_tokens_are_valid_while_one_replaces_the_other(
    open_client: OpenRegistry,
) -> None:
    await open_client("old").announce(ONE)
    await open_client("new", "old").announce(TWO)
    await become(open_client("old", "new"), [ONE, TWO])
    await become(open_client("new"), [TWO])


async def test_clusters_of_one_server_do_not_meet(open_client: OpenRegistry) -> None:
    await open_client(cluster="blue").announce(ONE)
    await open_client(cluster="green").announce(TWO)
    await become(open_client(cluster="green"), [TWO])


async def test_a_wrong_password_is_an_outage_that_does_not_show_it(
    open_client: OpenRegistry, raw: Redis
) -> None:
    await raw.config_set("requirepass", "right")
    with capture_logs() as logs, pytest.raises(RegistryUnavailable):
        await open_client(password="wrong").workers()
    assert logs and all("wrong" not in str(line.values()) for line in logs)
    assert await open_client(password="right").workers() == []
