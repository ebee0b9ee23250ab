"""A call of the registry's Redis server, bounded in time, with its failures as Baton's errors.

The client (registry_location.py) bounds each of its waits; a call may have several. The package
redis is optional, so it is imported with the first call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from baton.runtime.errors import Unavailable
from baton.runtime.registry_client import ANSWER_S


async def call_redis(call: Awaitable[Any]) -> Any:
    """Return the server's answer. Raises Unavailable if it refuses or does not answer in time."""
    from redis.exceptions import RedisError

    try:
        async with asyncio.timeout(ANSWER_S):
            return await call
    except TimeoutError as error:
        raise Unavailable(
            f"the registry's server has not answered within {ANSWER_S:g} s; what it was asked for "
            "may still happen"
        ) from error
    except (RedisError, OSError) as error:
        raise Unavailable(
            f"the registry's server does not answer ({type(error).__name__}: {error})"
        ) from error
