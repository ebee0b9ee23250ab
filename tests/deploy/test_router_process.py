"""A router's process: what it does once it listens."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.deploy.host.instance import admin_address_file
from baton.deploy.processes import router_process
from baton.router.console.admin_port import AdminAccess
from baton.runtime import dead_entries, registry_client
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.config import Config
from baton.runtime.errors import ConfigError
from baton.runtime.registry import DirectoryRegistry, WorkerRecord
from baton.runtime.registry_client import RegistryClient


def test_what_the_start_has_made_is_no_more_looked_through(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept: list[int] = []

    async def serve(
        *_: object, ready: Callable[[str], None], admin_ready: Callable[[int], None], **__: object
    ) -> None:
        kept.append(gc.get_freeze_count())
        admin_ready(9402)
        ready("http://127.0.0.1:8000/")
        kept.append(gc.get_freeze_count())

    gc.unfreeze()  # what another test has set apart
    monkeypatch.setattr(router_process, "serve_router", serve)
    address = tmp_path / "address"
    try:
        router_process.run_router(
            Config(
                security=SecurityConfig(tls="off"),
                registry=RegistryConfig(location=str(tmp_path)),
            ),
            model_folder=tmp_path,
            model_name="m",
            secrets=ClusterSecrets(("t",), "t"),
            address_file=address,
            admin=AdminAccess("the-operators-key-0123456789"),
        )
    finally:
        gc.unfreeze()
    before, after = kept
    assert before == 0 and after > 10_000  # modules, classes, functions
    assert address.read_text() == "127.0.0.1:8000"
    assert admin_address_file(address).read_text() == "127.0.0.1:9402"


def test_a_router_with_a_wrong_authority_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def serve(*_: object, **__: object) -> None: ...

    monkeypatch.setattr(router_process, "serve_router", serve)
    registry = RegistryConfig(location="rediss://host", authority=str(tmp_path / "no.pem"))
    with pytest.raises(ConfigError, match=r"registry\.authority: .*no\.pem cannot be used"):
        router_process.run_router(
            Config(security=SecurityConfig(tls="off"), registry=registry),
            model_folder=tmp_path,
            model_name="m",
            secrets=ClusterSecrets(("t",), "t"),
            address_file=None,
        )


def test_a_router_deletes_the_entries_of_dead_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left: list[list[str]] = []

    async def serve(*_: object, registry: RegistryClient, **__: object) -> None:
        async with asyncio.timeout(20):
            while os.listdir(tmp_path):
                await registry.workers()
        left.append(os.listdir(tmp_path))

    DirectoryRegistry(tmp_path).announce(
        WorkerRecord("decode-0", "a" * 32, "decode", "127.0.0.1:1", "127.0.0.1:2", "m", 10)
    )
    monkeypatch.setattr(registry_client, "SWEEP_S", 0.0)
    monkeypatch.setattr(dead_entries, "DEAD_S", 0.0)
    monkeypatch.setattr(router_process, "serve_router", serve)
    router_process.run_router(
        Config(security=SecurityConfig(tls="off"), registry=RegistryConfig(location=str(tmp_path))),
        model_folder=tmp_path,
        model_name="m",
        secrets=ClusterSecrets(("t",), "t"),
        address_file=None,
    )
    assert left == [[]]
