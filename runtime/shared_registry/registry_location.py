"""Where a cluster's workers register: a folder of one host, or a Redis server for many hosts.

The only place that chooses between the two. redis-py is imported only for a server's URL. Holds
no state.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.dead_entries import DeadEntries
from baton.runtime.errors import ConfigError
from baton.runtime.registry import DirectoryRegistry
from baton.runtime.registry_client import ANSWER_S, RegistryClient, ThreadedRegistry
from baton.runtime.shared_registry.report_exchange import ReportExchange
from baton.runtime.shared_registry.router_report import ReportSigner
from baton.runtime.shared_registry.signed_entry import EntrySigner

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from baton.runtime.shared_registry.tls_connection import RedisTls

SCHEMES = ("redis", "rediss")
PORT = 6379
MAX_CONNECTIONS = 16
_SOCKET_TIMEOUT_S = 0.75 * ANSWER_S  # so that an attempt ends before its caller stops waiting
# Seconds of silence before the first probe, seconds between probes, and probes without an answer.
# Other systems than Linux lack some names, and use their own times.
_KEEPALIVE = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}
_CLUSTER = re.compile(r"[A-Za-z0-9_-]{1,64}")


def folder_of(registry: RegistryConfig) -> Path | None:
    """Return the registry's folder; None for a server. Raises ConfigError where none is set."""
    if not registry.location:
        raise ConfigError(
            "registry.location is not set: give --registry FOLDER for workers of one host, or "
            "--registry redis://HOST:PORT for several hosts"
        )
    scheme, separator, _ = registry.location.partition("://")
    if not separator:
        return Path(registry.location)
    if scheme not in SCHEMES:
        raise ConfigError(
            f"registry.location begins with {scheme[:20]}://: give a folder, redis:// or rediss://"
        )
    return None


def holds_password(location: str) -> bool:
    """Whether it is a server's URL with a password. Raises ConfigError for a malformed URL, of
    which any part may be one."""
    if "://" not in location:
        return False
    url = _split(location)
    _parts(url)
    return url.password is not None


def check_argument(location: str) -> None:
    """Raise ConfigError for a password on a command line, which other users of the host see, and
    for a malformed URL."""
    if holds_password(location):
        raise ConfigError(
            "registry.location holds a password and goes on a command line, which other users of "
            "this host see: take it out, and set BATON_REGISTRY__PASSWORD"
        )


def check_tls_files(registry: RegistryConfig, security: SecurityConfig) -> None:
    """Raise ConfigError if a certificate file for a rediss:// server cannot be used. For the start
    of a process: one that runs reads the files at each connection, and tries again."""
    if folder_of(registry) is not None or not registry.location.startswith("rediss://"):
        return
    try:
        _tls_of(registry, security).context()
    except ModuleNotFoundError as error:
        raise _not_installed() from error
    except OSError as error:
        raise ConfigError(f"{error}: give a PEM file that this user may read") from error


def open_registry(
    registry: RegistryConfig,
    security: SecurityConfig,
    tokens: tuple[str, ...],
    *,
    deletes_dead: bool = False,
) -> RegistryClient:
    """Return the client of the configured registry; its server is connected at the first call.
    `tokens` are those that this cluster accepts, the one that it sends first. With `deletes_dead`
    the client deletes entries of dead workers in a folder; a server's expire. Raises ConfigError.
    """
    folder = folder_of(registry)
    if folder is not None:
        dead = DeadEntries(folder) if deletes_dead else None
        return ThreadedRegistry(DirectoryRegistry(folder, tokens=tokens), dead)
    try:
        from baton.runtime.shared_registry.redis_registry import RedisRegistry
    except ModuleNotFoundError as error:
        raise _not_installed() from error
    client, server = open_server(registry, security)
    signer, prefix = EntrySigner(tokens), key_prefix(registry)
    return RedisRegistry(client, server, prefix, signer, registry.lifetime_s)


def key_prefix(registry: RegistryConfig) -> str:
    """Return the beginning of all keys of the cluster on its server. Raises ConfigError."""
    if not _CLUSTER.fullmatch(registry.cluster):
        raise ConfigError(
            f"registry.cluster is {registry.cluster[:80]!r}: give 1 to 64 letters, digits, '-', '_'"
        )
    return f"baton:{registry.cluster}"


def open_reports(
    registry: RegistryConfig, security: SecurityConfig, tokens: tuple[str, ...]
) -> ReportExchange | None:
    """Return how this router reaches the others, over the registry's server; None for a folder.
    Its own connection: a burst of reports delays no entry. Raises ConfigError."""
    if folder_of(registry) is not None:
        return None
    try:
        from baton.runtime.shared_registry.router_reports import RedisReports
    except ModuleNotFoundError as error:
        raise _not_installed() from error
    client, server = open_server(registry, security)
    signer, host = ReportSigner(tokens), socket.gethostname()
    return RedisReports(client, server, key_prefix(registry), signer, host=host)


def _not_installed() -> ConfigError:
    return ConfigError(
        "registry.location is a Redis server and the package redis is not installed: "
        "pip install 'baton-serve[redis]'"
    )


def address_without_secrets(registry: RegistryConfig) -> str:
    """Return the folder, or the server's address without user and password. Raises ConfigError."""
    folder = folder_of(registry)
    if folder is not None:
        return str(folder)
    url = _split(registry.location)
    host, port, database = _parts(url)
    return f"{url.scheme}://{host}:{port}/{database}"


def open_server(registry: RegistryConfig, security: SecurityConfig) -> tuple[Redis, str]:
    """Return redis-py's client, not connected yet, and the server's address without secrets."""
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    url = _split(registry.location)
    host, port, database = _parts(url)
    options: dict[str, Any] = {
        "host": host,
        "port": port,
        "db": database,
        "username": unquote(url.username) if url.username else None,
        "password": registry.password or unquote(url.password or "") or None,
        "socket_timeout": _SOCKET_TIMEOUT_S,
        "socket_connect_timeout": _SOCKET_TIMEOUT_S,
        "socket_keepalive": True,  # notices a lost server on connections that only listen
        "socket_keepalive_options": _KEEPALIVE,
        "max_connections": MAX_CONNECTIONS,
        "retry": Retry(NoBackoff(), 0),  # the registry repeats what failed
    }
    if url.scheme == "rediss":
        return _tls_client(registry, security, options), address_without_secrets(registry)
    return Redis(**options), address_without_secrets(registry)


def _split(location: str) -> SplitResult:
    try:
        return urlsplit(location)
    except ValueError:
        raise _malformed() from None  # its text may hold the password


def _parts(url: SplitResult) -> tuple[str, int, int]:
    try:
        host, port = url.hostname, url.port or PORT
        database = int(url.path.strip("/") or "0")
    except ValueError:
        host, port, database = None, PORT, 0
    if not host or url.query or url.fragment or database < 0:
        raise _malformed()
    return host, port, database


def _malformed() -> ConfigError:
    """Return the error, which shows no part of the URL: the password may stand in any."""
    return ConfigError(
        "registry.location is no URL of a server: write redis://HOST:PORT/DATABASE (rediss:// "
        "for TLS), and the password as registry.password"
    )


def _tls_client(
    registry: RegistryConfig, security: SecurityConfig, options: dict[str, Any]
) -> Redis:
    from redis.asyncio import ConnectionPool, Redis

    from baton.runtime.shared_registry.tls_connection import TlsConnection

    tls = _tls_of(registry, security)
    return Redis.from_pool(ConnectionPool(connection_class=TlsConnection, tls=tls, **options))


def _tls_of(registry: RegistryConfig, security: SecurityConfig) -> RedisTls:
    """This process shows its own certificate if it has one."""
    from baton.runtime.shared_registry.tls_connection import RedisTls

    return RedisTls(
        authority=registry.authority or security.authority,
        certificate=security.certificate,
        key=security.key,
        system=not registry.authority,
    )
