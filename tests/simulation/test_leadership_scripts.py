"""The simulated server runs the leadership's scripts as a Redis server does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.planner.control.leadership import (
    NEXT_TERM_SCRIPT,
    RELEASE_SCRIPT,
    RENEW_SCRIPT,
    STORE_SCRIPT,
)
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.shared_registry.registry_location import open_server
from baton.simulation.control.leadership_scripts import LEADERSHIP_SCRIPTS
from baton.simulation.virtual.simulated_redis import Values
from chaos.redis_server import RedisServer, running_server
from tests.support.redis_server import required_binary

LAST_TERM = b"9000000000"  # later than any clock here
CALLS: tuple[tuple[str, tuple[bytes, ...], tuple[bytes, ...]], ...] = (
    (RENEW_SCRIPT, (b"lead",), (b"one", b"10000")),
    (RENEW_SCRIPT, (b"lead",), (b"two", b"10000")),
    (RENEW_SCRIPT, (b"absent",), (b"one", b"10000")),
    (STORE_SCRIPT, (b"lead", b"memory"), (b"one", b"text", b"100")),
    (STORE_SCRIPT, (b"lead", b"memory"), (b"two", b"other", b"100")),
    (NEXT_TERM_SCRIPT, (b"term",), ()),
    (NEXT_TERM_SCRIPT, (b"term",), ()),
    (RELEASE_SCRIPT, (b"lead",), (b"two",)),
    (RELEASE_SCRIPT, (b"lead",), (b"one",)),
    (RELEASE_SCRIPT, (b"lead",), (b"one",)),
    (STORE_SCRIPT, (b"lead", b"memory"), (b"one", b"third", b"100")),
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_server(tmp_path, required_binary()) as made:
        yield made


async def test_simulated_scripts_answer_as_the_server_does(server: RedisServer) -> None:
    client, _ = open_server(RegistryConfig(location=server.url), SecurityConfig(tls="off"))
    values: Values = {b"lead": (b"one", 10.0), b"term": (LAST_TERM, 10.0)}
    for key, (value, _) in values.items():
        await client.set(key, value)
    answers = []
    for script, keys, arguments in CALLS:
        expected = await client.eval(script, len(keys), *keys, *arguments)
        found = LEADERSHIP_SCRIPTS[script].run(values, 0.0, list(keys), list(arguments))
        assert found == expected, script
        answers.append(found)
        for key in (b"lead", b"memory", b"term"):
            assert await client.get(key) == values.get(key, (None, 0.0))[0]
    assert answers == [1, 0, 0, 1, 0, b"9000000001", b"9000000002", 0, 1, 0, 0]
    await client.aclose()
