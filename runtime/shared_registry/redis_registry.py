"""A registry that workers and routers of many hosts share: signed entries on a Redis server.

    worker ── SET (expires) + PUBLISH ──▶ Redis ── notification ──▶ reader's MemberTable
                                            └──── SCAN + GETRANGE every FULL_READ_S ──▲

A notification carries the entry itself, so a member is known at once, and stays known while a full
server refuses to store. The full read repairs what was missed. While the server cannot be read,
the members known before stay listed (OutageLog reports it). All state is of one event loop.
Redis 7 or Valkey.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.runtime import logs
from baton.runtime.errors import ConfigError
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import RegistryUnavailable
from baton.runtime.shared_registry.member_table import MemberTable
from baton.runtime.shared_registry.outage_log import OutageLog
from baton.runtime.shared_registry.signed_entry import MAX_ENTRY_BYTES, EntrySigner, SignedEntry

FULL_READ_S = 5.0
RECONNECT_S = (0.1, 1.0)  # first and longest wait
CLOSE_S = 1.0
CANCEL_S = 0.1  # before a task is cancelled again
PAGE_KEYS = 500  # of one SCAN
MAX_PAGES = 2000  # of one full read
BURST = 100  # notifications between two turns of the loop
MAX_FAULTS = 16  # rejected entries that are reported
_DIGEST_BYTES = 8

log = logs.get(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Boot:
    """A boot that this process announces."""

    record: WorkerRecord
    started: int
    counter: int

    def next_entry(self, wall_ns: int, *, withdrawn: bool = False) -> SignedEntry:
        self.counter = max(self.counter + 1, wall_ns)
        return SignedEntry(self.record, self.started, self.counter, withdrawn)


class RedisRegistry:
    """Implements `RegistryClient`. `server` is its address without secrets, `prefix` begins all of
    its keys, `lifetime_s` is how long an entry lasts that is not renewed, `wall_ns` the host's
    clock, which orders entries and the boots of a worker."""

    def __init__(
        self,
        client: Redis,
        server: str,
        prefix: str,
        signer: EntrySigner,
        lifetime_s: float,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._client = client
        self._server = server
        self._prefix = prefix
        self._channel = f"{prefix}:entries"
        self._signer = signer
        self._lifetime_s = lifetime_s
        self._wall_ns = wall_ns
        self._table = MemberTable(lifetime_s)
        self._outage = OutageLog(server)
        self._boots: dict[str, _Boot] = {}  # by boot id
        self._faults: dict[str, str] = {}
        self._following: asyncio.Task[None] | None = None
        self._is_read = False
        self._waiting: set[asyncio.Future[list[WorkerRecord]]] = set()  # for the first read
        self._writes: set[asyncio.Task[None]] = set()

    def announce(self, record: WorkerRecord) -> asyncio.Future[None]:
        """Raises RegistryUnavailable, which is reported already, and ConfigError for a record
        that no reader would take."""
        self._follow()
        boot = self._boots.get(record.boot_id)
        if boot is None:
            boot = self._boots[record.boot_id] = _Boot(record, self._wall_ns(), 0)
        boot.record = record
        return self._start_write(lambda: boot.next_entry(self._wall_ns()))

    def withdraw(self, worker_id: str, boot_id: str) -> asyncio.Future[None]:
        """Leave a signed entry that says so: a deletion would count for nothing."""
        boot = self._boots.pop(boot_id, None)
        if boot is None or boot.record.worker_id != worker_id:
            return self._start(_nothing())
        return self._start_write(lambda: boot.next_entry(self._wall_ns(), withdrawn=True))

    def workers(self) -> asyncio.Future[list[WorkerRecord]]:
        """The members known now, during an outage those known before it. Raises
        RegistryUnavailable where the server could not be read yet."""
        self._follow()
        future: asyncio.Future[list[WorkerRecord]] = asyncio.get_running_loop().create_future()
        if self._is_read:
            future.set_result(self._table.records())
        else:
            self._waiting.add(future)
            future.add_done_callback(self._waiting.discard)
        return future

    def faults(self) -> Mapping[str, str]:
        """Rejected entries of the last full read, by key: their worker id proves nothing."""
        return self._faults

    async def close(self) -> None:
        """End all tasks and connections; writes get CLOSE_S to end."""
        if self._writes:
            await asyncio.wait(set(self._writes), timeout=CLOSE_S)
        tasks = [*self._writes, *([self._following] if self._following else [])]
        # redis-py may lose a cancellation while it connects
        while running := [task for task in tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=CANCEL_S)
        await self._client.aclose()

    def _start_write(self, next_entry: Callable[[], SignedEntry]) -> asyncio.Future[None]:
        return self._start(self._write(next_entry))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._writes.add(task)
        task.add_done_callback(self._forget_write)
        return task

    def _forget_write(self, task: asyncio.Task[None]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have stopped waiting

    async def _write(self, next_entry: Callable[[], SignedEntry]) -> None:
        entry = next_entry()
        content = self._signer.write(entry)
        pipeline = self._client.pipeline(transaction=False)
        pipeline.set(self._key(entry), content, px=round(self._lifetime_s * 1000))
        pipeline.publish(self._channel, content)
        try:
            results = await pipeline.execute(raise_on_error=False)
            for result in results:
                if isinstance(result, Exception):
                    raise result
        except (RedisError, OSError) as error:
            self._outage.failed("write", _reason(error), _now())
            raise RegistryUnavailable(f"{self._server}: {_reason(error)}") from error
        self._outage.worked("write", _now())

    def _key(self, entry: SignedEntry) -> str:
        """Keys have one length, so that a reader can ask for no longer ones."""
        digest = blake2b(entry.record.worker_id.encode(), digest_size=_DIGEST_BYTES).hexdigest()
        return f"{self._prefix}:{digest}:{entry.record.boot_id}"

    def _follow(self) -> None:
        if self._following is None or self._following.done():
            self._following = asyncio.get_running_loop().create_task(
                self._run(), name="registry reader"
            )

    async def _run(self) -> None:
        """Read and follow the server until cancelled."""
        pause_s = RECONNECT_S[0]
        while True:
            begun_s = _now()
            try:
                await self._follow_notifications()
            except (RedisError, OSError) as error:
                self._report_unread(_reason(error))
            if _now() - begun_s > FULL_READ_S:
                pause_s = RECONNECT_S[0]
            # A lost server is called again after longer and longer pauses, at a random time in
            # each.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, RECONNECT_S[1])

    async def _follow_notifications(self) -> None:
        """Subscribe, read all, and take what is announced. Raises RedisError or OSError when the
        server fails."""
        async with self._client.pubsub() as channel:
            await channel.subscribe(self._channel)
            table_s = await self._read_all()
            self._table.resume(table_s)  # what was missed before does not count as silence
            self._report_read()
            due_s, burst = _now() + FULL_READ_S, 0
            while True:
                wait_s = max(0.001, due_s - _now())
                message = await channel.get_message(ignore_subscribe_messages=True, timeout=wait_s)
                if message is not None and message["type"] == "message":
                    self._learn(message["data"])
                    burst += 1
                if burst >= BURST:
                    burst = 0
                    await asyncio.sleep(0)
                if _now() >= due_s:
                    self._table.expire(await self._read_all())
                    self._report_read()
                    due_s = _now() + FULL_READ_S

    async def _read_all(self) -> float:
        """Learn from all entries; return when that began."""
        begun_s, faults = _now(), dict[str, str]()
        async for keys in self._pages():
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.getrange(key, 0, MAX_ENTRY_BYTES)  # one byte more than it may have
            contents = await pipeline.execute(raise_on_error=False)
            for key, content in zip(keys, contents, strict=True):
                fault = self._learn_stored(content)
                if fault is not None and len(faults) < MAX_FAULTS:
                    faults[key.decode(errors="replace")] = fault
        self._faults = faults
        return begun_s

    async def _pages(self) -> AsyncIterator[list[bytes]]:
        """Yield the keys of entries, page by page. One key may come twice."""
        pattern = f"{self._prefix}:{'?' * 2 * _DIGEST_BYTES}:{'?' * 32}"
        cursor = 0
        for _ in range(MAX_PAGES):
            cursor, keys = await self._client.scan(cursor, match=pattern, count=PAGE_KEYS)
            if found := [key for key in keys if isinstance(key, bytes)]:
                yield found
            if cursor == 0:
                return
        log.warning(
            "registry read incomplete",
            server=self._server,
            keys=MAX_PAGES * PAGE_KEYS,
            remedy="give Baton a database of its own on the server",
        )

    def _learn_stored(self, content: object) -> str | None:
        """Learn from a stored value. Return why it does not count, if it is faulty."""
        if content == b"":
            return None  # it has expired since
        if not isinstance(content, bytes):
            return "it is no string"
        return self._learn(content)

    def _learn(self, content: bytes) -> str | None:
        entry = self._signer.read(content)
        if isinstance(entry, str):
            return entry
        self._table.learn(entry, _now())
        return None

    def _report_read(self) -> None:
        self._is_read = True
        self._outage.worked("read", _now())
        for future in [*self._waiting]:
            if not future.done():
                future.set_result(self._table.records())

    def _report_unread(self, reason: str) -> None:
        self._outage.failed("read", reason, _now())
        for future in [*self._waiting]:
            if not future.done():
                future.set_exception(RegistryUnavailable(f"{self._server}: {reason}"))
                future.exception()  # its caller may have stopped waiting


async def _nothing() -> None:
    pass


def _now() -> float:
    return asyncio.get_running_loop().time()


def _reason(error: Exception) -> str:
    """Return one line that names no secret."""
    if isinstance(error, ConfigError):
        return str(error)
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no answer in time'}"
