"""The number of a Ray fleet's workers on a real Redis server: asked for, refused, forged, lost."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from baton.deploy.control.fleet_number import (
    MAX_NUMBER_BYTES,
    MAX_WORKERS,
    FleetNumber,
    FleetSize,
    ForeignNumber,
)
from baton.deploy.nodes.fleet_follower import FleetFollower
from baton.deploy.nodes.fleet_plan import FleetOptions
from baton.planner.control.leadership import TERM_S
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.errors import BatonError, Unavailable
from baton.runtime.settings.loading import load
from baton.runtime.shared_registry.registry_location import key_prefix, open_server
from baton.runtime.shared_registry.signed_json import SignedJson
from chaos.redis_server import RedisServer, running_server
from tests.support.redis_server import required_binary

OPTIONS = FleetOptions(load(None, {}, {"registry.location": "redis://r:6379/0"}), {}, 1, 2)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_server(tmp_path, required_binary()) as made:
        yield made


def number_of(
    server: RedisServer, *tokens: str, clock: Callable[[], float] = time.monotonic
) -> FleetNumber:
    config = RegistryConfig(location=server.url)
    client, _ = open_server(config, SecurityConfig(tls="off"))
    return FleetNumber(client, key_prefix(config), tokens or ("token",), clock)


def client_of(server: RedisServer) -> tuple[Redis, str]:
    """Return a client of any process, and the number's key."""
    config = RegistryConfig(location=server.url)
    client, _ = open_server(config, SecurityConfig(tls="off"))
    return client, f"{key_prefix(config)}:fleet"


@pytest.fixture
async def number(server: RedisServer) -> AsyncIterator[FleetNumber]:
    made = number_of(server)
    yield made
    await made.close()


async def test_a_controller_changes_the_decode_workers(number: FleetNumber) -> None:
    await number.propose(FleetSize(2, 3))
    await number.propose(FleetSize(1, 1))  # there is one
    seen = await number.count()
    assert (seen.asked, seen.last_id) == (5, "decode-2")
    await number.check(seen, 7)
    await number.resize(seen, 7)
    found = await number.read()
    assert found is not None and found[0] == FleetSize(2, 5)
    await number.clear()
    assert await number.read() is None


async def test_a_number_that_another_has_changed_stays(number: FleetNumber) -> None:
    await number.propose(FleetSize(1, 2))
    seen = await number.count()
    await number.resize(seen, 4)
    for call in (number.check, number.resize):
        with pytest.raises(BatonError, match="has changed since it was read"):
            await call(seen, 2)
    assert (await number.count()).asked == 4


async def test_a_number_that_leaves_no_decode_worker_is_refused(number: FleetNumber) -> None:
    await number.propose(FleetSize(2, 2))
    seen = await number.count()
    for workers in (0, 2, 5000):
        with pytest.raises(BatonError, match="leave no decode worker"):
            await number.check(seen, workers)
        with pytest.raises(BatonError, match="leave no decode worker"):
            await number.resize(seen, workers)


async def test_without_a_fleet_the_remedy_is_named(number: FleetNumber) -> None:
    with pytest.raises(Unavailable, match="start `baton fleet --follow`"):
        await number.count()


async def test_a_forged_number_does_not_count(server: RedisServer, number: FleetNumber) -> None:
    foreign = number_of(server, "another token")
    await foreign.propose(FleetSize(1, 900))
    with pytest.raises(BatonError, match="not signed with this cluster's token"):
        await number.read()
    with pytest.raises(BatonError, match="not signed"):
        await number.count()
    await foreign.clear()
    await number.propose(FleetSize(1, 2))
    rotated = number_of(server, "new", "token")
    assert (await rotated.count()).asked == 3
    for each in (foreign, rotated):
        await each.close()


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def signed(**content: object) -> bytes:
    """Return a text with this cluster's signature."""
    fields = frozenset(content)
    return SignedJson(("token",), b"baton-fleet", fields, MAX_NUMBER_BYTES, "").write(content)


FOREIGN = {
    "unsigned": (b'{"prefill": 1, "decode": 900, "signature": ""}', "not signed with this"),
    "no json": (b"9", "no number of this version"),
    "empty": (b"", "no number of this version"),
    "of another version": (signed(prefill=1, decode=2, spare=3), "no number of this version"),
    "out of bounds": (signed(prefill=1, decode=MAX_WORKERS), "no number of workers"),
    "without decode workers": (signed(prefill=1, decode=0), "no number of workers"),
    "no whole number": (signed(prefill=1, decode=2.5), "no number of workers"),
    "long": (b"[" * 100_000, "longer than 1024 bytes"),
}


@pytest.mark.parametrize("kind", FOREIGN)
async def test_the_leader_puts_its_number_back(server: RedisServer, kind: str) -> None:
    text, reason = FOREIGN[kind]
    client, key = client_of(server)
    clock = Clock()
    number, driver = number_of(server, clock=clock), number_of(server)
    await number.propose(FleetSize(1, 4))
    assert (await number.count()).asked == 5
    await client.set(key, text)
    with pytest.raises(ForeignNumber, match=f"{reason}.*; a controller that leads and has read"):
        await driver.read()
    clock.now_s += TERM_S
    with capture_logs() as logs:
        assert (await number.count()).asked == 5
    assert await driver.read() == (FleetSize(1, 4), number.text_of(FleetSize(1, 4)))
    (event,) = [each for each in logs if each["event"] == "fleet number restored"]
    assert reason in event["reason"] and "registry.cluster" in event["remedy"]
    await client.aclose()
    for each in (number, driver):
        await each.close()


async def test_an_old_number_is_not_put_back(server: RedisServer) -> None:
    """Another controller may have led and changed it since."""
    client, key = client_of(server)
    clock = Clock()
    number, fresh = number_of(server, clock=clock), number_of(server)
    await number.propose(FleetSize(1, 4))
    await number.resize(await number.count(), 7)
    await client.set(key, b"foreign")
    clock.now_s += TERM_S + 0.1
    for each in (number, fresh):
        with pytest.raises(ForeignNumber, match=f"if this error lasts, .*`redis-cli DEL {key}`"):
            await each.count()
    assert await client.get(key) == b"foreign"
    clock.now_s -= 1.0
    assert (await number.count()).asked == 7, "what it has asked for itself"
    await client.aclose()
    for each in (number, fresh):
        await each.close()


async def test_a_followed_number_outlives_its_token(
    server: RedisServer, number: FleetNumber
) -> None:
    """The three steps of a new token: its driver signs the number again in the second one."""
    await number.propose(FleetSize(1, 4))
    both, new = number_of(server, "new", "token"), number_of(server, "new")
    with pytest.raises(BatonError, match="delete that key"):
        await new.count()
    orders = await FleetFollower(both, OPTIONS).orders()
    assert orders is not None and len(orders) == 5
    assert (await new.count()).asked == 5
    assert (await both.read()) == (await new.read())
    for each in (both, new):
        await each.close()


async def test_a_number_that_no_reader_takes_is_not_written(number: FleetNumber) -> None:
    await number.propose(FleetSize(1, 4))
    found = await number.read()
    assert found is not None
    with pytest.raises(BatonError, match="1 prefill and 3000 decode workers do not make a fleet"):
        await number.replace(found[1], FleetSize(1, 3000))
    assert await number.read() == found


async def test_a_server_that_is_gone_is_named(server: RedisServer, number: FleetNumber) -> None:
    await number.propose(FleetSize(1, 2))
    seen = await number.count()
    server.kill()
    for call in (number.count(), number.resize(seen, 4), number.clear()):
        with pytest.raises(Unavailable, match="server does not answer"):
            await call
