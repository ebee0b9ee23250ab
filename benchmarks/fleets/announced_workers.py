"""Keeps the workers of a benchmark's process in the registry until SIGTERM or SIGINT ends it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from baton.runtime.registry import DirectoryRegistry, WorkerRecord

RENEW_S = 5.0  # the registry forgets a silent worker after 15


async def announce_until_ended(
    registry: DirectoryRegistry, records: Sequence[WorkerRecord]
) -> None:
    """Announce `records` every RENEW_S seconds. Returns after SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for end in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(end, stop.set)
    while not stop.is_set():
        for record in records:
            registry.announce(record)
        try:
            async with asyncio.timeout(RENEW_S):
                await stop.wait()
        except TimeoutError:
            continue
