"""Which of several role controllers acts: one at a time, and another one once it has ended."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.planner.control import leadership as leadership_module
from baton.planner.control.leadership import (
    LOCK_FILE,
    MEMORY_FILE,
    MEMORY_LIFETIME_S,
    TERM_S,
    FileLeadership,
    RedisLeadership,
)
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.errors import ConfigError, Unavailable
from baton.runtime.registry import DirectoryRegistry
from baton.runtime.shared_registry.registry_location import key_prefix, open_server
from chaos.redis_server import RedisServer, running_server
from tests.support.redis_server import required_binary


async def test_one_of_two_holds_the_lock_of_a_folder(tmp_path: Path) -> None:
    first, second = FileLeadership(tmp_path), FileLeadership(tmp_path)
    assert await first.hold() and await first.hold()
    assert not await second.hold()
    held = first.term
    assert (held > 0, second.term) == (True, 0)
    assert (first.lasts_s(), second.lasts_s()) == (math.inf, 0.0)
    await first.close()
    assert await second.hold()
    assert first.term == 0 and second.term > held
    await second.close()


HOLD_AND_END = """
import asyncio, os, sys
from pathlib import Path
from baton.planner.control.leadership import FileLeadership
assert asyncio.run(FileLeadership(Path(sys.argv[1])).hold())
os._exit(9)
"""  # as if it was killed: nothing is closed


async def test_the_lock_of_a_killed_controller_is_free(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", HOLD_AND_END, str(tmp_path)]
    done = await asyncio.to_thread(subprocess.run, command, timeout=60)
    assert done.returncode == 9
    second = FileLeadership(tmp_path)
    before = int((tmp_path / LOCK_FILE).read_text())
    assert await second.hold()
    assert second.term > before
    await second.close()


async def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="controller.lock cannot be opened"):
        await FileLeadership(tmp_path / "absent").hold()


async def test_what_a_leader_leaves_in_a_folder_outlives_it(tmp_path: Path) -> None:
    first, second = FileLeadership(tmp_path), FileLeadership(tmp_path)
    assert await first.load() is None
    assert await first.hold()
    await first.store(b"one")
    await first.store(b"two")
    assert (tmp_path / MEMORY_FILE).stat().st_mode & 0o777 == 0o600
    assert abs(await first.time() - await second.time()) < 60
    with pytest.raises(Unavailable, match="does not lead"):
        await second.store(b"three")
    await first.close()
    assert await second.load() == b"two"
    await second.close()


async def test_a_file_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    leadership = FileLeadership(tmp_path)
    assert await leadership.hold()
    (tmp_path / MEMORY_FILE).mkdir()
    with pytest.raises(Unavailable, match="controller.memory cannot be written"):
        await leadership.store(b"one")
    with pytest.raises(Unavailable, match="controller.memory cannot be read"):
        await leadership.load()
    await leadership.close()


async def test_the_registry_ignores_the_files_of_controllers(tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    registry = DirectoryRegistry(folder, tokens=("t",))
    leadership = FileLeadership(folder)
    assert await leadership.hold()
    await leadership.store(b"one")
    assert (folder / LOCK_FILE).exists() and (folder / MEMORY_FILE).exists()
    assert registry.workers() == []
    await leadership.close()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_server(tmp_path, required_binary()) as made:
        yield made


@pytest.fixture
async def two(server: RedisServer) -> AsyncIterator[tuple[RedisLeadership, RedisLeadership]]:
    made = tuple(leadership(server, Clock()) for _ in range(2))
    yield made[0], made[1]
    for each in made:
        await each.close()


def leadership(server: RedisServer, clock: Clock) -> RedisLeadership:
    config = RegistryConfig(location=server.url)
    client, _ = open_server(config, SecurityConfig(tls="off"))
    return RedisLeadership(client, key_prefix(config), clock)


async def test_one_of_two_leads_over_redis(two: tuple[RedisLeadership, RedisLeadership]) -> None:
    first, second = two
    assert await first.hold() and await first.hold()
    held = first.term
    assert not await second.hold()
    await first.close()
    assert await second.hold()
    assert second.term > held
    await second.close()


async def test_terms_grow_where_the_server_has_lost_its_data(server: RedisServer) -> None:
    """Workers refuse orders of lower terms than they have seen: they would refuse all orders."""
    first = leadership(server, Clock())
    assert await first.hold()
    client, _ = open_server(RegistryConfig(location=server.url), SecurityConfig(tls="off"))
    await client.flushall()
    await asyncio.sleep(1.1)  # a term lasts longer
    second = leadership(server, Clock())
    assert await second.hold() and second.term > first.term
    await client.aclose()
    for each in (first, second):
        await each.close()


async def test_an_outage_ends_the_leadership_in_time(server: RedisServer) -> None:
    """It holds its term to the end, and no longer: then another one may lead."""
    clock = Clock()
    first = leadership(server, clock)
    assert await first.hold()
    server.kill()
    clock.now_s = TERM_S - 0.1
    assert await first.hold()
    assert first.lasts_s() == pytest.approx(0.1)
    clock.now_s = TERM_S
    assert not await first.hold()
    assert (first.term, first.lasts_s()) == (0, 0.0)
    await first.close()


async def test_a_leader_that_was_paused_finds_another_one(server: RedisServer) -> None:
    """Its key has expired and is another's now: it does not renew that."""
    clock = Clock()
    first, second = leadership(server, clock), leadership(server, Clock())
    assert await first.hold()
    client, _ = open_server(RegistryConfig(location=server.url), SecurityConfig(tls="off"))
    assert await client.delete(f"{key_prefix(RegistryConfig())}:controller") == 1
    held = first.term
    assert await second.hold()
    assert second.term > held
    assert not await first.hold()
    await client.aclose()
    for each in (first, second):
        await each.close()


async def test_a_key_that_is_taken_again_has_no_earlier_term(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another may have led between: workers would refuse all orders of the earlier term."""
    first = leadership(server, Clock())
    assert await first.hold()
    client, _ = open_server(RegistryConfig(location=server.url), SecurityConfig(tls="off"))
    await client.flushall()
    monkeypatch.setattr(leadership_module, "NEXT_TERM_SCRIPT", "return redis.error_reply('none')")
    assert not await first.hold()
    assert (first.term, first.lasts_s()) == (0, 0.0)
    await client.aclose()
    await first.close()


async def test_only_the_leader_leaves_something_on_redis(
    two: tuple[RedisLeadership, RedisLeadership],
) -> None:
    """One that was paused writes nothing over what its successor has written."""
    first, second = two
    assert await first.hold()
    assert await first.load() is None
    await first.store(b"of the first")
    with pytest.raises(Unavailable, match="another controller leads"):
        await second.store(b"of the second")
    await first.close()
    assert await second.hold()
    assert await second.load() == b"of the first"
    await second.store(b"of the second")
    with pytest.raises(Unavailable, match="another controller leads"):
        await first.store(b"late")
    assert await second.load() == b"of the second"


async def test_what_is_left_on_redis_lasts_as_long_as_brakes(server: RedisServer) -> None:
    first = leadership(server, Clock())
    assert await first.hold()
    await first.store(b"one")
    client, _ = open_server(RegistryConfig(location=server.url), SecurityConfig(tls="off"))
    left_s = await client.ttl(f"{key_prefix(RegistryConfig())}:controller:memory")
    assert 3600 < left_s <= MEMORY_LIFETIME_S
    seconds, _ = await client.time()
    assert abs(await first.time() - seconds) < 60
    await client.aclose()
    server.kill()
    for call in (first.store(b"two"), first.load(), first.time()):
        with pytest.raises(Unavailable, match="does not answer"):
            await call
    await first.close()
