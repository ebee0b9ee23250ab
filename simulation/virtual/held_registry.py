"""The registry as simulated processes read it: at once, or not before its file system answers.

While it is held, calls stay open, as those of `ThreadedRegistry` do; `release` answers them with
what is registered by then. Where it cannot be read at all, each call fails at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from baton.runtime.registry import MemoryRegistry, WorkerRecord

T = TypeVar("T")


class HeldRegistry:
    """Implements `RegistryClient` for all processes of one world."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self._registry = registry
        self._waiting: list[tuple[asyncio.Future[Any], Callable[[], Any]]] = []
        self._holds = 0
        self._failures = 0

    def announce(self, record: WorkerRecord) -> asyncio.Future[None]:
        return self._ask(partial(self._registry.announce, record))

    def withdraw(self, worker_id: str, boot_id: str) -> asyncio.Future[None]:
        return self._ask(partial(self._registry.withdraw, worker_id, boot_id))

    def workers(self) -> asyncio.Future[list[WorkerRecord]]:
        return self._ask(self._registry.workers)

    def faults(self) -> Mapping[str, str]:
        return self._registry.faults()

    async def close(self) -> None:
        """There is nothing to end."""

    def hold(self) -> None:
        self._holds += 1

    def release(self) -> None:
        self._holds -= 1
        if self._holds:
            return
        waiting, self._waiting = self._waiting, []
        for future, work in waiting:
            if not future.done():
                future.set_result(work())

    def fail(self) -> None:
        self._failures += 1

    def recover(self) -> None:
        self._failures -= 1

    def _ask(self, work: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._holds:
            self._waiting.append((future, work))
        elif self._failures:
            future.set_exception(OSError("no descriptor is left"))
        else:
            future.set_result(work())
        return future
