"""Where a registry is: a folder or a server, and what is refused."""

from __future__ import annotations

import socket
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio

from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.errors import ConfigError
from baton.runtime.registry_client import ThreadedRegistry
from baton.runtime.shared_registry.registry_location import (
    check_argument,
    check_tls_files,
    folder_of,
    open_registry,
    open_server,
)

PLAIN = SecurityConfig(tls="off")

_FOLDER_ALONE = """
import sys, tempfile
from baton.deploy.processes import router_process, worker_process
from baton.deploy.serve import serve
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.shared_registry.registry_location import open_registry, open_reports
for opened in (open_registry, open_reports):
    opened(RegistryConfig(location=sys.argv[1]), SecurityConfig(tls="off"), ("t",))
print("redis" in sys.modules)
"""


def test_a_folder_needs_no_redis(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FOLDER_ALONE, str(tmp_path / "registry")]
    assert subprocess.check_output(command, text=True) == "False\n"


def test_a_folder_is_a_registry_of_this_host(tmp_path: Path) -> None:
    config = RegistryConfig(location=str(tmp_path))
    assert folder_of(config) == tmp_path
    assert isinstance(open_registry(config, PLAIN, ("t",)), ThreadedRegistry)


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("", "registry.location is not set"),
        ("http://host", "http://: give a folder, redis:// or rediss://"),
        ("redis://", "no URL of a server"),
        ("redis://host:port/0", "no URL of a server"),
        ("redis://host:99999999/0", "no URL of a server"),
        ("redis://host/zero", "no URL of a server"),
        ("redis://host/-1", "no URL of a server"),
        ("redis://host/0?db=3", "no URL of a server"),
        ("redis://[::1:6379", "no URL of a server"),
    ],
)
def test_a_location_that_is_none_is_refused(location: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_registry(RegistryConfig(location=location), PLAIN, ("t",))


@pytest.mark.parametrize("cluster", ["", "a:b", "x" * 65, "*"])
def test_a_cluster_name_with_other_characters_is_refused(cluster: str) -> None:
    with pytest.raises(ConfigError, match=r"registry\.cluster"):
        open_registry(RegistryConfig(location="redis://host", cluster=cluster), PLAIN, ("t",))


def test_a_password_on_a_command_line_is_refused_unshown() -> None:
    with pytest.raises(ConfigError, match="BATON_REGISTRY__PASSWORD") as refused:
        check_argument("redis://user:hunter2@host:6379/0")
    assert "hunter2" not in str(refused.value)
    check_argument("redis://user@host:6379/0")
    check_argument("/some/folder")


@pytest.mark.parametrize(
    "location",
    ["redis://:hunt[er2@host", "redis://:hunt/er2@host", "redis://user:12#hunter2@host"],
)
def test_a_malformed_url_is_refused_without_its_password(location: str) -> None:
    with pytest.raises(ConfigError, match="no URL of a server") as refused:
        check_argument(location)
    with pytest.raises(ConfigError, match="no URL of a server") as opened:
        open_registry(RegistryConfig(location=location), PLAIN, ("t",))
    for error in (refused.value, opened.value):
        assert "er2" not in "".join(traceback.format_exception(error, limit=0))


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_wrong_authority_is_refused_at_the_start_by_name(
    content: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "authority.pem"
    if content is not None:
        file.write_text(content)
    config = RegistryConfig(location="rediss://host", authority=str(file))
    with pytest.raises(ConfigError, match=rf"registry\.authority: {file} cannot be used \(.*PEM"):
        check_tls_files(config, PLAIN)
    check_tls_files(replace(config, location="redis://host"), PLAIN)  # which reads no file


def test_other_files_of_a_server_over_tls_are_named(tmp_path: Path) -> None:
    config, no = RegistryConfig(location="rediss://host"), str(tmp_path / "no.pem")
    with pytest.raises(ConfigError, match=rf"security\.authority: {no} cannot be used"):
        check_tls_files(config, SecurityConfig("on", authority=no))
    with pytest.raises(ConfigError, match=rf"security\.certificate: {no}, security\.key: {no} "):
        check_tls_files(config, SecurityConfig("on", certificate=no, key=no))


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_connections_to_a_server_ask_for_keepalive(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py has not always done so by itself."""
    asked: list[dict[str, object]] = []

    class Recorded:
        def __init__(self, **options: object) -> None:
            asked.append(options)

        @classmethod
        def from_pool(cls, pool: redis.asyncio.ConnectionPool) -> Recorded:
            return cls(**pool.connection_kwargs)

    monkeypatch.setattr(redis.asyncio, "Redis", Recorded)
    open_server(RegistryConfig(location=f"{scheme}://host"), PLAIN)
    (options,) = asked
    assert options["socket_keepalive"] is True
    assert options["socket_keepalive_options"] == {
        socket.TCP_KEEPIDLE: 15,
        socket.TCP_KEEPINTVL: 5,
        socket.TCP_KEEPCNT: 3,
    }
