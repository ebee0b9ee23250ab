"""The number of workers that `baton fleet --follow` keeps, on the registry's Redis server.

    baton fleet ─ writes its own where there is none, follows it ─▶ number ◀─ resize ─ controller

Ray has no object that says how many workers a fleet has: its driver has. So the number lies where
both find it, signed with the cluster's token, and is replaced only if it is still what was read. A
worker for which no node has room is an actor that waits, which Ray's autoscaler counts as demand:
nothing else has to be asked of Ray. Owns its client.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.deploy.control.orders import Cluster
from baton.deploy.control.redis_calls import call_redis
from baton.deploy.control.worker_count import WorkerCount, fleet_count
from baton.planner.overdue_workers import WorkerProblem
from baton.runtime.errors import BatonError, ConfigError, Unavailable
from baton.runtime.shared_registry.registry_location import folder_of, key_prefix, open_server
from baton.runtime.shared_registry.signed_json import SignedJson

if TYPE_CHECKING:
    from redis.asyncio import Redis

MAX_NUMBER_BYTES = 1024
MAX_WORKERS = 2048
_FIELDS = frozenset(("prefill", "decode"))
_REPLACE = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then "
    "redis.call('set', KEYS[1], ARGV[2]) return 1 else return 0 end"
)


@dataclass(frozen=True, slots=True)
class FleetSize:
    """Workers by the role in which they begin; the controller changes their roles later."""

    prefill: int
    decode: int


class FleetNumber:
    """Methods raise Unavailable if the server does not answer, BatonError for a number that is not
    signed, or that was changed since it was read."""

    def __init__(self, client: Redis, prefix: str, tokens: tuple[str, ...]) -> None:
        self._client = client
        self._key = f"{prefix}:fleet"
        self._texts = SignedJson(tokens, b"baton-fleet", _FIELDS, MAX_NUMBER_BYTES, "number")

    async def read(self) -> tuple[FleetSize, bytes] | None:
        """Return the number, and the text that says so; None if there is none."""
        text = await call_redis(self._client.get(self._key))
        if text is None:
            return None
        found = self._texts.read(bytes(text))
        if isinstance(found, str) or (size := _size(found)) is None:
            reason = found if isinstance(found, str) else "it is no number of workers"
            raise BatonError(
                f"the fleet's number at {self._key} is not valid: {reason}; delete that key, and "
                "`baton fleet --follow` writes its own"
            )
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
        size, text = await self._read()
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
        await self.replace(seen.version.encode(), self._resized(size, workers))

    async def replace(self, text: bytes, size: FleetSize) -> None:
        """Write a number in place of the text that was read."""
        changed = self.text_of(size)
        if not await call_redis(self._client.eval(_REPLACE, 1, self._key, text, changed)):
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
