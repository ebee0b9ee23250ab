"""A scripted NIXL agent in place of the installed bindings."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from baton.kv_transfer import nixl_agent
from baton.kv_transfer.nixl_agent import NixlAgent
from tests.support.nixl_agents import opened_agent
from tests.support.scripted_nixl import ScriptedAgent
from tests.support.waiting import wait_until


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedAgent:
    fake = ScriptedAgent()
    bindings = SimpleNamespace(
        __name__="scripted",
        nixl_agent=lambda name, config: fake,
        nixl_agent_config=lambda **options: options,
    )
    monkeypatch.setattr(nixl_agent, "load_bindings", lambda: bindings)
    monkeypatch.setattr(nixl_agent, "STOP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(nixl_agent, "ERROR_PAUSE_S", 0.001)
    return fake


@pytest.fixture
def made(scripted: ScriptedAgent) -> Iterator[tuple[NixlAgent, ScriptedAgent]]:
    agent = opened_agent()
    yield agent, scripted
    agent.stop()
    wait_until(lambda: not agent.alive)
