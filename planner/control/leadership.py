"""One controller acts where several run: a lock on a file of the registry's folder, or a key of its
Redis server that expires.

    follower ─ lock free ─▶ leader, with the next term ─ lost, or not renewed for TERM_S ─▶ follower

The kernel frees the file's lock when its holder ends, however it ends. The key lasts for TERM_S
after it was renewed; its holder counts its own time from before each renewal, so it stops first.
Terms are counted on the server, from its time in seconds, and stand in each log line of a step. A
leader sends no order that may outlast its term, and none in the first TERM_S of it: by then what
the one before has ordered is in the reports. An order names one boot, which accepts one. An order
to change a role names its term too: a worker that the next leader has asked refuses a late one of
the leader before. An order to drain has no term (docs/decisions/0142-number-of-workers.md).

Beside the leadership lies a text that only its holder writes, for the next one
(controller_memory.py): a file of that folder, or a key of that server.
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from baton.planner.control.redis_calls import call_redis
from baton.runtime import logs
from baton.runtime.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from redis.asyncio import Redis

TERM_S = 10.0
LOCK_FILE = "controller.lock"
MEMORY_FILE = "controller.memory"
MEMORY_LIFETIME_S = 7200  # the brakes of a controller look back an hour
RENEW_SCRIPT = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then "
    "return redis.call('pexpire', KEYS[1], ARGV[2]) else return 0 end"
)
# One more than the last term, and at least the server's time in seconds: a server that has lost
# its data gives no term that is lower than one before.
NEXT_TERM_SCRIPT = (
    "local last = tonumber(redis.call('get', KEYS[1]) or '0') "
    "local term = string.format('%.0f', math.max(last + 1, tonumber(redis.call('time')[1]))) "
    "redis.call('set', KEYS[1], term) return term"
)
STORE_SCRIPT = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then "
    "redis.call('set', KEYS[2], ARGV[2], 'EX', ARGV[3]) return 1 else return 0 end"
)
RELEASE_SCRIPT = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then "
    "return redis.call('del', KEYS[1]) else return 0 end"
)

log = logs.get(__name__)


class Leadership(Protocol):
    """`term` is that of the present leadership, 0 without one."""

    term: int

    async def hold(self) -> bool:
        """Take or renew the leadership; return whether it is held now."""
        ...

    def lasts_s(self) -> float:
        """Return for how long it is held without being renewed."""
        ...

    async def store(self, text: bytes) -> None:
        """Replace the text for the next leader. Raises Unavailable if another controller
        leads, or if the write may have failed."""
        ...

    async def load(self) -> bytes | None:
        """Return the text that was left last. Raises Unavailable if it cannot be read."""
        ...

    async def time(self) -> float:
        """Return the store's clock, in seconds: the same for all controllers. Raises
        Unavailable."""
        ...

    async def close(self) -> None:
        """Give the leadership up."""
        ...


class FileLeadership:
    """The lock of a file in the registry's folder, for one host."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._file: int | None = None
        self.term = 0

    async def hold(self) -> bool:
        """Raises ConfigError if the file cannot be locked at all."""
        if self._file is not None:
            return True
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be opened ({error.strerror}): give a registry that this "
                "user can write"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        self.term = max(int(os.pread(file, 20, 0) or b"0") + 1, int(time.time()))
        os.pwrite(file, str(self.term).encode(), 0)
        return True

    def lasts_s(self) -> float:
        return 0.0 if self._file is None else math.inf

    async def store(self, text: bytes) -> None:
        if self._file is None:
            raise Unavailable(
                "this controller does not lead: it writes no text for the next leader"
            )
        path = self._path.with_name(MEMORY_FILE)
        draft = path.with_suffix(".draft")
        try:
            draft.touch(mode=0o600)
            draft.write_bytes(text)
            draft.replace(path)
        except OSError as error:
            raise Unavailable(f"{path} cannot be written: {error.strerror}") from error

    async def load(self) -> bytes | None:
        path = self._path.with_name(MEMORY_FILE)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"{path} cannot be read: {error.strerror}") from error

    async def time(self) -> float:
        return time.time()

    async def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file, self.term = None, 0


class RedisLeadership:
    """A key with a random value, for many hosts. An outage of the server ends the leadership."""

    def __init__(self, client: Redis, prefix: str, clock: Callable[[], float]) -> None:
        self._client = client
        self._key = f"{prefix}:controller"
        self._memory_key = f"{prefix}:controller:memory"
        self._term_key = f"{prefix}:controller:term"
        self._clock = clock
        self._value = secrets.token_hex(16)
        self._until_s = 0.0
        self.term = 0

    async def hold(self) -> bool:
        begun_s = self._clock()
        lasts_ms = round(TERM_S * 1000)
        try:
            if self.term and await self._renewed(lasts_ms):
                self._until_s = begun_s + TERM_S
            elif await call_redis(self._client.set(self._key, self._value, nx=True, px=lasts_ms)):
                self._until_s, self.term = begun_s + TERM_S, 0  # no term is held twice
                counting = self._client.eval(NEXT_TERM_SCRIPT, 1, self._term_key)
                self.term = int(await call_redis(counting))
            else:
                self.term = 0
        except Unavailable as error:
            log.warning("leadership not renewed", reason=str(error))
        if self._clock() >= self._until_s:
            self.term = 0
        return self.term > 0

    async def _renewed(self, lasts_ms: int) -> bool:
        renewal = self._client.eval(RENEW_SCRIPT, 1, self._key, self._value, lasts_ms)
        return bool(await call_redis(renewal))

    def lasts_s(self) -> float:
        return max(0.0, self._until_s - self._clock()) if self.term else 0.0

    async def store(self, text: bytes) -> None:
        keys = self._key, self._memory_key
        stored = await call_redis(
            self._client.eval(STORE_SCRIPT, len(keys), *keys, self._value, text, MEMORY_LIFETIME_S)
        )
        if not stored:
            raise Unavailable(
                "another controller leads: this one writes no text for the next leader"
            )

    async def load(self) -> bytes | None:
        found = await call_redis(self._client.get(self._memory_key))
        return None if found is None else bytes(found)

    async def time(self) -> float:
        seconds, microseconds = await call_redis(self._client.time())
        return float(seconds) + float(microseconds) / 1e6

    async def close(self) -> None:
        """The key expires where the server cannot be reached now."""
        try:
            await call_redis(self._client.eval(RELEASE_SCRIPT, 1, self._key, self._value))
        except Unavailable as error:
            log.warning("leadership not released", reason=str(error))
        self.term = 0
        await self._client.aclose()
