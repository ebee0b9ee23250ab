"""A call of the registry's Redis server, with its failures as Baton's errors.

The client (registry_location.py) bounds each call in time. The package redis is optional, so it is
imported with the first call.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from baton.runtime.errors import Unavailable


async def call_redis(call: Awaitable[Any]) -> Any:
    """Return the server's answer. Raises Unavailable if it refuses or does not answer in time."""
    from redis.exceptions import RedisError

    try:
        return await call
    except (RedisError, OSError) as error:
        raise Unavailable(
            f"the registry's server does not answer ({type(error).__name__}: {error})"
        ) from error
