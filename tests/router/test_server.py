"""Starting and stopping the router: ports, exposure, broken tokenizers."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baton.router.server import bind, check_exposure, serve_router, url_of
from baton.runtime.config import Config, RouterConfig
from baton.runtime.errors import ConfigError, ModelError
from baton.runtime.registry import MemoryRegistry
from baton.runtime.registry_client import InlineRegistry


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .*router\.port"):
            bind("127.0.0.1", port)


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"router\.host"):
        bind("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("host", "keys", "allowed"),
    [
        ("127.0.0.1", (), True),
        ("127.8.8.8", (), True),
        ("::1", (), True),
        ("localhost", (), True),
        ("0.0.0.0", (), False),
        ("::", (), False),
        ("example.org", (), False),
        ("0.0.0.0", ("k",), True),
    ],
)
def test_an_open_host_needs_keys(host: str, keys: tuple[str, ...], allowed: bool) -> None:
    config = RouterConfig(host=host, api_keys=keys)
    if allowed:
        check_exposure(config)
        return
    with pytest.raises(ConfigError, match=r"router\.host.*router\.api_keys"):
        check_exposure(config)


@pytest.mark.parametrize("host", ["..", "a" * 300, "no\0name"])
def test_what_can_be_no_host_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.host is .*set a host name or an address"):
        bind(host, 0)


def test_urls() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


async def serve(folder: Path, ready: Callable[[str], None] | None = None) -> None:
    await serve_router(
        replace(Config(), router=RouterConfig(port=0)),
        model_folder=folder,
        model_name="tiny",
        registry=InlineRegistry(MemoryRegistry()),
        token="t",
        ready=ready,
    )


async def test_a_broken_tokenizer_is_the_models_error(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(model_folder, folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        await serve(folder)


async def test_cancelling_frees_the_port(model_folder: Path) -> None:
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(model_folder, url.set_result))
    waited: set[asyncio.Future[None] | asyncio.Future[str]] = {serving, url}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    bind("127.0.0.1", int(url.result().rpartition(":")[2])).close()
