"""One NIXL agent, and the only thread that calls it.

NIXL's calls may block (a READ over shared memory is copied inside `transfer`), so they run in this
thread, off the event loop. The thread posts READs, polls those in flight, and polls notifications,
which serves peers' READs: every millisecond on request, rarely otherwise. It knows no asyncio: it
calls the callbacks of a command or a READ. READs come in segments (read_segments.py) from a queue
that the mover's agents share, and few at a time are in flight from a peer.

A READ ends when NIXL reports done or error. Nothing else ends it: releasing its handle does not
reliably stop it (docs/decisions/0001-read-not-write.md), so the thread keeps polling an abandoned
READ and keeps its peer. After an error NIXL fails all READs from that peer until it is removed and
added again (UCX does not open a broken connection again), so the next READ does that first.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from baton.kv_transfer.block_sizes import BlockRatio
from baton.kv_transfer.local_pool import DRAM, LocalPool, prepare_ucx
from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.nixl_library import (
    described,
    every_block,
    library_versions,
    load_bindings,
    memories,
    register_pool,
)
from baton.kv_transfer.read_segments import ReadSegment, blocks_enough
from baton.kv_transfer.read_shape import ReadShape
from baton.kv_transfer.segment_queue import SegmentQueue
from baton.runtime import logs
from baton.runtime.errors import ConfigError, ReadFailed

log = logs.get(__name__)

MAX_COMMANDS = 4096
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 1.0  # for READs in flight when the agent stops
SPIN_S = 0.0001  # between polls of READs in flight
DEVICE_SPIN_S = 0.00002  # the same, of a device's memory, which moves 64 MiB in 35 us
HELD_POLL_S = 0.001  # while leases exist
IDLE_POLL_S = 0.02
ERROR_PAUSE_S = 0.2
RECONNECT_S = 1.0  # between connections to a peer whose READs fail; READs wait as long for others
MAX_POSTING_S = 0.005  # at a time, when posting copies


@dataclass(slots=True)
class _Peer:
    boot_id: bytes
    pool: PeerPool
    shape: ReadShape
    name: Any = None  # None: not added
    blocks: Any = None  # prepared descriptors of its whole pool
    own: Any = None  # of the own pool, for this shape; None: those of whole blocks
    added_s: float = 0.0
    broken_s: float | None = None  # when a READ failed, since it was added
    reads: int = 0  # in flight
    forgotten: bool = False


@dataclass(frozen=True, slots=True)
class _Flight:
    """A posted segment of a READ."""

    handle: Any
    peer: _Peer
    segment: ReadSegment


class NixlAgent:
    """The agent of one pool, whose memory must outlive it. `segments`: the queue of the mover's
    agents. Raises ConfigError if NIXL does not start or rejects this memory."""

    def __init__(
        self, pool: LocalPool, name: str, segments: SegmentQueue, share: tuple[int, int] = (0, 1)
    ) -> None:
        """Start the thread. `share`: the agent's number, and how many the mover has."""
        self._pool = pool
        self._share = share
        self._name = name
        self._segments = segments
        self._enough = blocks_enough(pool)
        self._spin_s = SPIN_S if pool.memory == DRAM else DEVICE_SPIN_S
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue(MAX_COMMANDS)
        self._forgets: deque[bytes] = deque()  # at most one for each connected peer
        self._peers: dict[bytes, _Peer] = {}
        self._leaving: list[_Peer] = []  # forgotten with READs in flight
        self._flights: list[_Flight] = []
        self._more = False  # queued segments may be posted now
        self._stopping = False
        self.holds = 0  # leases that need progress; written by the owner
        self.versions: dict[str, str] = {}  # of its libraries, after the start
        self.unsettled = 0  # READs in flight at the last poll
        self.turned_s = time.monotonic()  # when the thread last began a turn or a command
        started: Future[bytes] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name=f"nixl-{name[:8]}", daemon=True
        )
        self._thread.start()
        try:
            self.metadata: bytes = started.result(START_TIMEOUT_S)
        except TimeoutError:
            raise ConfigError(
                f"NIXL did not start in {START_TIMEOUT_S:g} s: run `baton doctor`"
            ) from None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def do(self, command: Callable[[], None]) -> bool:
        """Queue a command for the agent's thread; returns False if too many are queued."""
        try:
            self._commands.put_nowait(command)
        except queue.Full:
            return False
        return True

    def forget(self, boot_id: bytes) -> None:
        """Release a connected peer before any later command, or when its last READ in flight has
        ended."""
        self._forgets.append(boot_id)
        self.wake()

    def wake(self) -> None:
        """Post and poll now instead of after the pause; not needed if commands are queued."""
        self.do(lambda: None)

    def stop(self) -> None:
        """End the thread; blocks for at most 2 * STOP_TIMEOUT_S. READs that have not ended by then
        never report, and their blocks are lost."""
        self._stopping = True
        self.wake()
        self._thread.join(2 * STOP_TIMEOUT_S)

    # All methods below run in the agent's thread.

    def connect(self, pool: PeerPool) -> None:
        """Prepare to read a peer's pool. Raises ReadFailed."""
        if pool.boot_id in self._peers:
            return
        if any(peer.boot_id == pool.boot_id for peer in self._leaving):
            raise ReadFailed(f"earlier READs from {_short(pool.boot_id)} are still in flight")
        shape = pool.shape(self._pool.block_bytes, len(self._pool.rank_pools))
        peer = _Peer(pool.boot_id, pool, shape)
        self._add(peer)
        self._peers[pool.boot_id] = peer

    def _add(self, peer: _Peer) -> None:
        """Add a peer to NIXL, and prepare what its READs need. Raises ReadFailed."""
        pool, shape = peer.pool, peer.shape
        peer.added_s = time.monotonic()
        try:
            peer.name = self._agent.add_remote_agent(pool.metadata)
            rows = [(cut.granter_rank, cut.granter_offset, cut.length) for cut in shape.cuts]
            blocks = every_block(pool, rows)
            peer.blocks = self._agent.prep_xfer_dlist(peer.name, blocks, pool.memory)
            peer.own = self._own_blocks(shape, pool.ratio)
        except Exception as error:  # NIXL's bindings raise classes of their own
            self._remove(peer)
            raise ReadFailed(f"NIXL cannot reach {_short(pool.boot_id)}: {error}") from error
        peer.broken_s = None

    def _own_blocks(self, shape: ReadShape, ratio: BlockRatio) -> Any:
        """Return the descriptors of the own pool's cells for a peer's units; None where they are
        whole blocks."""
        rows = [(cut.reader_rank, cut.reader_offset, cut.length) for cut in shape.cuts]
        if rows == [(0, 0, self._pool.block_bytes)]:
            return None
        own = every_block(described(self._pool, ratio.joined), rows)
        return self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", own, self._pool.memory)

    def _forget(self, boot_id: bytes) -> None:
        peer = self._peers.pop(boot_id, None)
        if peer is None:
            return
        peer.forgotten = True
        if peer.reads == 0:
            self._remove(peer)
        else:
            self._leaving.append(peer)

    def _post_waiting(self) -> None:
        """Post segments of peers that are not full, for at most MAX_POSTING_S, so that commands,
        polls and a stop are not delayed. A READ that this thread copies has ended when it is
        posted, and its bytes are still in the cache for `landed`."""
        until = time.monotonic() + MAX_POSTING_S
        while not self._stopping and time.monotonic() < until:
            segment = self._segments.take(self._full())
            if segment is None:
                self._more = False
                return
            self._post(segment)
        self._more = not self._stopping

    def _full(self) -> set[bytes]:
        """Return the peers with enough segments in flight in this agent. Those of abandoned READs
        do not count, since they may never end. A peer whose connection broke is full until the
        others in flight have ended too, for RECONNECT_S at most."""
        blocks: Counter[bytes] = Counter()
        broken, now = set[bytes](), time.monotonic()
        for flight in self._flights:
            if flight.peer.broken_s is not None and now < flight.peer.broken_s + RECONNECT_S:
                broken.add(flight.peer.boot_id)
            if flight.segment.read.failure is None and not flight.peer.forgotten:
                joined = flight.peer.pool.ratio.joined
                blocks[flight.peer.boot_id] += -(-len(flight.segment.local) // joined)
        return broken | {boot_id for boot_id, count in blocks.items() if count > self._enough}

    def _post(self, segment: ReadSegment) -> None:
        try:
            peer = self._reachable(segment.read.boot_id)
        except ReadFailed as failure:
            self._segments.ended(segment, failure)
            return
        try:
            handle = self._agent.make_prepped_xfer(
                "READ",
                self._blocks if peer.own is None else peer.own,
                peer.shape.end(
                    segment.local, self._pool.blocks * peer.pool.ratio.joined, granter=False
                ),
                peer.blocks,
                peer.shape.end(segment.remote, peer.pool.num_blocks, granter=True),
            )
        except Exception as error:  # NIXL's bindings raise classes of their own
            self._segments.ended(segment, _failed(error))
            return
        peer.reads += 1
        flight = _Flight(handle, peer, segment)
        if not self._ends(flight, self._agent.transfer):
            self._flights.append(flight)

    def _reachable(self, boot_id: bytes) -> _Peer:
        """Return a connected peer, added again if a READ from it failed. Raises ReadFailed."""
        peer = self._peers.get(boot_id)
        if peer is None:
            raise ReadFailed(f"{_short(boot_id)} is not connected")
        if peer.broken_s is not None:
            if peer.reads:
                raise ReadFailed(f"the connection to {_short(boot_id)} broke, with READs in flight")
            if time.monotonic() < peer.added_s + RECONNECT_S:
                raise ReadFailed(f"the connection to {_short(boot_id)} broke again at once")
            self._remove(peer)
            self._add(peer)
            log.warning("NIXL peer added again after an error", worker=_short(boot_id))
        return peer

    def _run(self, started: Future[bytes]) -> None:
        try:
            self._open()
        except Exception as error:  # raised where the start is awaited
            started.set_exception(error)
            return
        started.set_result(self._agent.get_agent_metadata())
        while not self._stopping:
            try:
                self._run_once()
            except Exception:  # READs in flight must still be polled
                log.exception("NIXL polling failed")
                time.sleep(ERROR_PAUSE_S)  # what fails at once would fill a core
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._flights and time.monotonic() < deadline:
            self._run_once()
        self._close()

    def _open(self) -> None:
        pool = self._pool
        prepare_ucx(pool.memory, os.environ)
        bindings = load_bindings()
        pool.enter_thread()
        config = bindings.nixl_agent_config(backends=[], enable_prog_thread=False)
        self._agent = bindings.nixl_agent(self._name, config)
        self._agent.create_backend("UCX", {})
        self.versions = library_versions(bindings.__name__)
        self._registered = register_pool(self._agent, pool)
        _bind_thread(*self._share)  # NIXL's own threads, started before, may use all
        rows = [(rank, 0, each.block_bytes) for rank, each in enumerate(memories(described(pool)))]
        own = every_block(described(pool), rows)
        self._blocks = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", own, pool.memory)

    def _run_once(self) -> None:
        """Wait for commands until the next poll is due, run them, and poll."""
        self.turned_s = time.monotonic()
        pause = self._spin_s if self._flights else HELD_POLL_S if self.holds else IDLE_POLL_S
        try:
            self._command(self._commands.get(block=not self._more, timeout=pause))
            while True:
                self._command(self._commands.get_nowait())
        except queue.Empty:
            pass  # the queue is empty
        except Exception:  # a failed command stops no other
            log.exception("NIXL command failed")
        self._post_waiting()
        before = len(self._flights)
        self._flights = [
            flight
            for flight in self._flights
            if not self._ends(flight, self._agent.check_xfer_state)
        ]
        self.unsettled = len(self._flights)
        self._more = self._more or self.unsettled < before
        self._agent.get_new_notifs()  # serves peers; messages are empty

    def _command(self, command: Callable[[], None]) -> None:
        self.turned_s = time.monotonic()
        while self._forgets:
            self._forget(self._forgets.popleft())
        command()

    def _ends(self, flight: _Flight, ask: Callable[[Any], str]) -> bool:
        """Get a READ's state from NIXL by posting or polling; if it has ended, notify its owner."""
        failure: ReadFailed | None = None
        try:
            state = ask(flight.handle)
        except Exception as error:  # NIXL reports a failed READ this way
            failure = _failed(error)
        else:
            if state == "PROC":
                return False
            if state != "DONE":
                failure = ReadFailed(f"NIXL reports {state} for a READ")
        self._release(flight.handle)
        peer = flight.peer
        if failure is not None and peer.broken_s is None:
            peer.broken_s = time.monotonic()
        peer.reads -= 1
        if peer.forgotten and peer.reads == 0:
            self._leaving.remove(peer)
            self._remove(peer)
        segment = flight.segment
        if failure is None and segment.read.landed is not None:
            try:
                segment.read.landed(segment.first, segment.end)
            except Exception as error:  # the owner must be notified in any case
                log.exception("READ callback failed")
                failure = _failed(error)
        self._segments.ended(segment, failure)
        return True

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except Exception as error:  # the READ has ended
            log.warning("NIXL handle not released", detail=str(error))

    def _remove(self, peer: _Peer) -> None:
        """Release what was prepared for a peer, and remove it, as far as it was added."""
        name, prepared = peer.name, (peer.blocks, peer.own)
        peer.name = peer.blocks = peer.own = None
        for blocks in prepared:
            if blocks is not None:
                self._release(blocks)
        if name is None:
            return
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:  # the peer is unused
            log.warning("NIXL peer not removed", detail=str(error))

    def _close(self) -> None:
        if self._flights:
            log.error("NIXL thread ended with unfinished READs", reads=len(self._flights))
            return  # NIXL may still write for them
        for boot_id in list(self._peers):
            self._forget(boot_id)
        self._release(self._blocks)
        self._agent.deregister_memory(self._registered)


def _bind_thread(number: int, of: int) -> None:
    """Bind the calling thread to every `of`-th CPU of those that it may use, from `number` on.
    Otherwise threads that copy for a few milliseconds may share a CPU while another idles, until
    the kernel moves one. With fewer CPUs than threads, no thread is bound."""
    cpus = sorted(os.sched_getaffinity(0))
    if 1 < of <= len(cpus):
        with contextlib.suppress(OSError):  # without permission it is only slower
            os.sched_setaffinity(0, cpus[number::of])


def _failed(error: Exception) -> ReadFailed:
    failure = ReadFailed(f"NIXL: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _short(boot_id: bytes) -> str:
    return f"worker {boot_id.hex()[:8]}"
