"""The number of workers that `baton fleet --follow` keeps, on the registry's Redis server.

    baton fleet ─ writes its own where there is none, follows it ─▶ number ◀─ resize ─ controller

Ray has no object that says how many workers a fleet has: its driver has. So the number lies where
both find it, signed with the cluster's token, and is replaced only if it is still what was read. A
worker for which no node has room is an actor that waits, which Ray's autoscaler counts as demand:
nothing else has to be asked of Ray. A text that is not signed, of another version or out of bounds
is no number: neither the driver nor a controller acts on it. A leader that has read the number
within TERM_S puts it back; one that has not leaves the text, until a user deletes it: another
controller may have changed the number since. Owns its client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.deploy.control.orders import Cluster
from baton.planner.control.leadership import TERM_S
from baton.planner.control.redis_calls import call_redis
from baton.planner.control.worker_count import WorkerCount, fleet_count
from baton.planner.overdue_workers import WorkerProblem
from baton.runtime import logs
from baton.runtime.errors import BatonError, ConfigError, Unavailable
from baton.runtime.shared_registry.registry_location import folder_of, key_prefix, open_server
from baton.runtime.shared_registry.signed_json import SignedJson

if TYPE_CHECKING:
    from redis.asyncio import Redis

MAX_NUMBER_BYTES = 1024
MAX_WORKERS = 2048
_FIELDS = frozenset(("prefill", "decode"))
# A longer text counts as none, so no more of it than that is read or compared.
_READ = (
    "if redis.call('exists', KEYS[1]) == 0 then return false end "
    "return redis.call('getrange', KEYS[1], 0, ARGV[1])"
)
_REPLACE = (
    "if redis.call('getrange', KEYS[1], 0, ARGV[3]) == ARGV[1] then "
    "redis.call('set', KEYS[1], ARGV[2]) return 1 else return 0 end"
)

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class FleetSize:
    """Workers by the role in which they begin; the controller changes their roles later."""

    prefill: int
    decode: int


class ForeignNumber(Unavailable):
    """The `text` at the fleet's key is no number that this cluster has written."""

    def __init__(self, message: str, text: bytes = b"") -> None:
        super().__init__(message)
        self.text = text

    @classmethod
    def at(cls, key: str, reason: str, text: bytes) -> ForeignNumber:
        """Return the error of a text that was read at `key`."""
        return cls(
            f"the fleet's number at {key} is not valid: {reason}; a controller that leads and has "
            f"read the number within the last {TERM_S:.0f} s puts it back; if this error lasts, "
            f"delete that key (`redis-cli DEL {key}`), and `baton fleet --follow` writes its own",
            text,
        )


class FleetNumber:
    """Methods raise Unavailable if the server does not answer, ForeignNumber for a text that is no
    number of this cluster's, BatonError for a number that was changed since it was read."""

    def __init__(
        self,
        client: Redis,
        prefix: str,
        tokens: tuple[str, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._clock = clock
        self._own: tuple[FleetSize, float] | None = None  # as counted last, and when
        self._key = f"{prefix}:fleet"
        self._texts = SignedJson(tokens, b"baton-fleet", _FIELDS, MAX_NUMBER_BYTES, "number")

    async def read(self) -> tuple[FleetSize, bytes] | None:
        """Return the number, and the text that says so; None if there is none."""
        text = await call_redis(self._client.eval(_READ, 1, self._key, MAX_NUMBER_BYTES))
        if text is None:
            return None
        found = self._texts.read(bytes(text))
        if isinstance(found, str) or (size := _size(found)) is None:
            reason = found if isinstance(found, str) else "it is no number of workers"
            raise ForeignNumber.at(self._key, reason, bytes(text))
        return size, bytes(text)

    def text_of(self, size: FleetSize) -> bytes:
        """Return what `replace` writes. Raises BatonError for a number that a fleet cannot have."""
        if not _is_possible(size):
            raise BatonError(
                f"{size.prefill} prefill and {size.decode} decode workers do not make a fleet: "
                f"`baton fleet` keeps at least one decode worker, and {MAX_WORKERS} workers at most"
            )
        return self._texts.write({"prefill": size.prefill, "decode": size.decode})

    async def propose(self, size: FleetSize) -> None:
        """Write a number if there is none yet."""
        await call_redis(self._client.set(self._key, self.text_of(size), nx=True))

    async def count(self) -> WorkerCount:
        """Read the number, as the controller that leads: a text that is none is replaced by the
        number that was counted within TERM_S, in which no other controller can have changed it."""
        try:
            size, text = await self._read()
        except ForeignNumber as error:
            if self._own is None or self._clock() - self._own[1] > TERM_S:
                raise
            size, _ = self._own
            await self.replace(error.text, size)
            log_restored(error, size)
            text = self.text_of(size)
        self._own = size, self._clock()
        return fleet_count(text.decode(), size.prefill, size.decode)

    async def check(self, seen: WorkerCount, workers: int) -> None:
        """Ask whether `resize` would be accepted now. Changes nothing."""
        size, text = await self._read()
        self._resized(size, workers)
        if text.decode() != seen.version:
            raise BatonError("the fleet's number has changed since it was read")

    async def resize(self, seen: WorkerCount, workers: int) -> None:
        """Ask for another number of decode workers, if the number is still as it was seen."""
        size, _ = await self._read()
        changed = self._resized(size, workers)
        await self.replace(seen.version.encode(), changed)
        self._own = changed, self._clock()

    async def replace(self, text: bytes, size: FleetSize) -> None:
        """Write a number in place of the text that was read."""
        changed = self.text_of(size)
        terms = self._key, text, changed, MAX_NUMBER_BYTES
        if not await call_redis(self._client.eval(_REPLACE, 1, *terms)):
            raise BatonError("the fleet's number has changed since it was read")

    async def problems(self, missing: Collection[str]) -> dict[str, WorkerProblem]:
        """Return nothing: `baton fleet` knows what its workers wait for, and logs it."""
        return {}

    async def clear(self) -> None:
        """Delete the number: its fleet has ended."""
        await call_redis(self._client.delete(self._key))

    async def close(self) -> None:
        await self._client.aclose()

    async def _read(self) -> tuple[FleetSize, bytes]:
        found = await self.read()
        if found is None:
            raise Unavailable(f"there is no number at {self._key}: start `baton fleet --follow`")
        return found

    def _resized(self, size: FleetSize, workers: int) -> FleetSize:
        if not size.prefill < workers <= MAX_WORKERS:
            raise BatonError(
                f"{workers} workers leave no decode worker beside the {size.prefill} prefill "
                f"workers of `baton fleet`, or are above {MAX_WORKERS}"
            )
        return FleetSize(size.prefill, workers - size.prefill)


def log_restored(error: ForeignNumber, size: FleetSize) -> None:
    """Log that a controller has put its number in place of a text that is none."""
    log.warning(
        "fleet number restored",
        prefill=size.prefill,
        decode=size.decode,
        reason=str(error),
        remedy="find out which process writes to the registry's server without this cluster's "
        "token: give clusters databases or names (registry.cluster) of their own",
    )


def open_fleet_number(cluster: Cluster) -> FleetNumber:
    """Return the number of `baton fleet --follow`. Raises ConfigError for a registry in a
    folder."""
    if folder_of(cluster.registry) is not None:
        raise ConfigError(
            f"registry.location is the folder {cluster.registry.location}, and the number of a "
            "fleet is on the Redis server of `baton fleet`: give --registry redis://HOST:PORT"
        )
    client, _ = open_server(cluster.registry, cluster.security)
    return FleetNumber(client, key_prefix(cluster.registry), cluster.secrets.accepted)


def _size(found: dict[str, Any]) -> FleetSize | None:
    """Return the number, or None if the text holds no valid number."""
    prefill, decode = found["prefill"], found["decode"]
    if type(prefill) is not int or type(decode) is not int:
        return None
    size = FleetSize(prefill, decode)
    return size if _is_possible(size) else None


def _is_possible(size: FleetSize) -> bool:
    return size.prefill >= 0 and size.decode >= 1 and size.prefill + size.decode <= MAX_WORKERS
