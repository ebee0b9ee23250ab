"""When a worker measures its peers: at first contact, or beside handoffs.

    first contact ─▶ a pair of the same hosts was measured as good ─▶ taken over; measured later
                 ├─▶ the granter names a later time ────────────────▶ used unmeasured until then
                 └─▶ else measured before the first handoff

A degraded pair is measured again after a minute, and then after twice as long each time. One pair
is measured at a time beside handoffs, after another handshake: the granter names the time, and
serves READs promptly then. If other pairs' measurements last beyond that time, another is taken.
After a lost connection, what is known of a host does not count for the same boot id. Owned by the
worker's loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.peers.bandwidth_probe import BandwidthProbe
from baton.kv_transfer.peers.probe_pace import HostBandwidths, host_key
from baton.kv_transfer.preflight import ROUNDS, PreflightReport
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import handoff_metrics, logs
from baton.runtime.errors import BatonError

log = logs.get(__name__)

LATER_ROUNDS = 2  # beside handoffs: 24 MiB
AGAIN_S, MAX_AGAIN_S = 60.0, 600.0
CONFIRM_S = (60.0, 600.0)  # after another worker's result was taken over
MAX_DROPPED = 256
LATE_S = 1.0  # after the granter's time another one is taken: it serves READs promptly for 5 s
MAX_HELD_S = 5.0  # for which one pair's time may keep the others waiting


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredPeer:
    """A connected peer, as its handshake described it. `greet` repeats the handshake: with a
    measurement to report it, with 0 to take a time for another one."""

    message: handoff_pb2.HandshakeMessage
    pool: PeerPool
    greet: Callable[[float], Awaitable[handoff_pb2.HandshakeMessage]]


class PeerMeasurements:
    """`boot_id` is the worker's own: its pauses are drawn from it."""

    def __init__(self, probe: BandwidthProbe, boot_id: bytes) -> None:
        self._probe = probe
        self._dice = random.Random(boot_id)
        self._hosts = HostBandwidths()
        self._later: dict[bytes, asyncio.Task[None]] = {}  # by boot id
        self._one_at_a_time = asyncio.Lock()
        self._met: set[bytes] = set()  # boot ids, until they are forgotten
        self._dropped: dict[bytes, None] = {}  # of those that were met, the oldest first

    def degraded(self) -> list[worker_pb2.DegradedPeer]:
        return self._probe.degraded()

    def transport(self, boot_id: bytes) -> str:
        """Same as `BandwidthProbe.transport`."""
        return self._probe.transport(boot_id)

    def forget(self, boot_id: bytes) -> None:
        """Remove a peer's mark: it is measured again before its next stream."""
        self._probe.forget(boot_id)
        if boot_id in self._met:  # else it has not answered: nothing is known against it
            self._dropped[boot_id] = None
        self._met.discard(boot_id)
        if len(self._dropped) > MAX_DROPPED:
            del self._dropped[next(iter(self._dropped))]
        later = self._later.pop(boot_id, None)
        if later is not None:
            later.cancel()

    async def meet(self, peer: MeasuredPeer) -> None:
        """Measure a peer, or take over what is known of its host, or see to it that it is measured
        later. Raises ReadFailed if its pool cannot be read."""
        message, boot_id = peer.message, peer.pool.boot_id
        is_new = boot_id not in self._dropped
        shared, after_s = self._shared(message), message.probe_after_ms / 1000
        if is_new and shared and shared >= self._probe.floor_gb_per_s:
            handoff_metrics.PEERS.labels("shared").inc()
            self._measure_later(peer, self._dice.uniform(*CONFIRM_S))
        elif after_s:
            handoff_metrics.PEERS.labels("postponed").inc()
            if shared:
                self._probe.mark(message.worker_id, boot_id, shared)
            self._measure_later(peer, after_s, has_time=True)
        else:
            report = await self._probe.check(message.worker_id, peer.pool)
            if report is None:  # no block was free: some will be
                self._measure_later(peer, self._again_s(AGAIN_S))
            else:
                self._record(peer, report)
                if message.host or report.degraded:
                    self._follow(peer, self._after_first(peer, report))
        self._met.add(boot_id)

    def _shared(self, message: handoff_pb2.HandshakeMessage) -> float:
        """Return what is known of the two hosts, by own measurements before those of others."""
        if not message.host:
            return 0.0
        own = self._hosts.known(host_key(message), asyncio.get_running_loop().time())
        return own or message.read_gb_per_s

    def _record(self, peer: MeasuredPeer, report: PreflightReport) -> None:
        now_s = asyncio.get_running_loop().time()
        self._hosts.record(host_key(peer.message), report.gb_per_s, now_s)

    # -- beside handoffs -----------------------------------------------------------------------

    def _measure_later(self, peer: MeasuredPeer, pause_s: float, *, has_time: bool = False) -> None:
        self._follow(peer, self._measure_until_good(peer, pause_s, has_time=has_time))

    def _follow(self, peer: MeasuredPeer, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends or the peer is forgotten."""
        boot_id, worker_id = peer.pool.boot_id, peer.message.worker_id
        task = asyncio.create_task(work, name=f"measure {worker_id}")
        self._later[boot_id] = task

        def ended(done: asyncio.Task[None]) -> None:
            if self._later.get(boot_id) is done:
                del self._later[boot_id]
            if not done.cancelled() and (error := done.exception()) is not None:
                log.error("measurement ended", worker=worker_id, error=repr(error))

        task.add_done_callback(ended)

    async def _after_first(self, peer: MeasuredPeer, report: PreflightReport) -> None:
        await self._tell(peer, report)
        if report.degraded:
            await self._measure_until_good(peer, self._again_s(AGAIN_S))

    async def _measure_until_good(
        self, peer: MeasuredPeer, pause_s: float, *, has_time: bool = False
    ) -> None:
        """Measure after `pause_s`, and again while the pair is degraded or was not measured.
        `has_time`: the granter has named the end of the pause."""
        again_s = AGAIN_S
        while True:
            # The granter, or the period of measurements, sets when this one begins.
            await asyncio.sleep(pause_s)
            try:
                report = await self._measure(peer, ROUNDS if has_time else LATER_ROUNDS, has_time)
            except BatonError as error:
                log.warning("peer not measured", worker=peer.message.worker_id, error=str(error))
                report = None
            if report is not None and not report.degraded:
                return
            has_time, pause_s = False, self._again_s(again_s)
            again_s = min(2 * again_s, MAX_AGAIN_S)

    async def _measure(
        self, peer: MeasuredPeer, rounds: int, has_time: bool
    ) -> PreflightReport | None:
        while True:
            turn_s = asyncio.get_running_loop().time()
            async with self._one_at_a_time:
                after_s = 0.0
                if not has_time or asyncio.get_running_loop().time() - turn_s > LATE_S:
                    after_s = (await peer.greet(0.0)).probe_after_ms / 1000
                if after_s <= MAX_HELD_S:
                    # The granter has promised its time from then on.
                    await asyncio.sleep(after_s)
                    report = await self._probe.check(peer.message.worker_id, peer.pool, rounds)
                    break
            # The granter has named the time after which it may be asked again.
            await asyncio.sleep(after_s)
            has_time = True
        if report is not None:
            self._record(peer, report)
            await self._tell(peer, report)
        return report

    async def _tell(self, peer: MeasuredPeer, report: PreflightReport) -> None:
        """Report to the granter, for other workers of this host. A lost report costs one of them a
        measurement."""
        if not peer.message.host:
            return
        try:
            await peer.greet(report.gb_per_s)
        except BatonError as error:
            log.info("measurement not reported", worker=peer.message.worker_id, error=str(error))

    def _again_s(self, pause_s: float) -> float:
        return pause_s * self._dice.uniform(1.0, 1.2)
