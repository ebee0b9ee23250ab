"""Simulated streams between machines: delayed, cut one way or both, reset; in order within each.

    near.send ─▶ [ on its way ] ─▶ arrives: at a cut, it is held until the cut is healed;
                                            at a dead machine, the stream is reset, unless it
                                            died silently: then no peer is notified

Two streams may overtake each other, the messages of one never do. What a machine's code holds is
a `Link` like any other (runtime/links.py); messages pass by reference. Owns the location of each
process, which ways are cut, which kinds of message are withheld, and the streams; knows no
messages' meaning.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from baton.proto import handoff_pb2, worker_pb2
from baton.runtime.links import LinkClosed
from baton.simulation.virtual.machine import Machine
from baton.simulation.virtual.virtual_loop import VirtualLoop

LANE_MESSAGES = 1024
NEXT_S = 1e-9  # between two messages of a stream

Service = Callable[["SimLink"], Coroutine[Any, Any, None]]


class Network:
    """`delay_s(source, target)` is drawn for each message. `services` are what the machine at
    an address serves, by name; the last machine of an address is the one that lives there."""

    def __init__(self, loop: VirtualLoop, delay_s: Callable[[Machine, Machine], float]) -> None:
        self.loop = loop
        self.delay_s = delay_s
        self.services: dict[str, tuple[Machine, dict[str, Service]]] = {}
        self.cuts: dict[tuple[str, str], int] = {}  # by address, one way; how often
        self.withheld: dict[tuple[str, str, str], list[tuple[_Lane, Any]]] = {}  # way and kind
        self._held: dict[tuple[str, str], list[_Lane]] = {}
        self._streams: dict[Stream, None] = {}

    def listen(self, machine: Machine, services: dict[str, Service]) -> None:
        self.services[machine.address] = (machine, services)

    def connect(self, source: Machine, address: str, service: str) -> SimLink:
        """The near end of a new stream. Whether a process answers at the other end shows later."""
        target, services = self.services[address]
        stream = Stream(self, source, target)
        self._streams[stream] = None
        near = stream.ends[0]
        near.outgoing.post(_Opening(stream, services[service], service))
        return near

    def cut(self, source: str, target: str) -> None:
        """Nothing sent from one address to the other arrives, until as many `heal`s."""
        self.cuts[source, target] = self.cuts.get((source, target), 0) + 1

    def heal(self, source: str, target: str) -> None:
        """Release held messages, in the order of each stream."""
        way = (source, target)
        self.cuts[way] -= 1
        if not self.cuts[way]:
            del self.cuts[way]
            for lane in self._held.pop(way, []):
                lane.release()

    def withhold(self, source: str, target: str, kind: str) -> None:
        """Messages of this kind wait where they are sent, until `send_again`; others pass them."""
        self.withheld[source, target, kind] = []

    def send_again(self, source: str, target: str, kind: str) -> None:
        for lane, message in self.withheld.pop((source, target, kind)):
            lane.post(message)

    def is_cut(self, source: Machine, target: Machine) -> bool:
        return (source.address, target.address) in self.cuts

    def hold(self, lane: _Lane) -> None:
        self._held.setdefault(lane.way, []).append(lane)

    def reset(self, one: str, other: str, *, half: bool = False) -> int:
        """Break every stream between two addresses at both ends; how many there were. `half`:
        at the first one's end; the other hears of it when it sends again."""
        found = [
            stream
            for stream in self._streams
            if {stream.machines[0].address, stream.machines[1].address} == {one, other}
        ]
        for stream in found:
            if half:
                stream.break_end(stream.machines[0].address != one)
            else:
                stream.break_off()
        return len(found)

    def killed(self, machine: Machine) -> None:
        """Its peers hear of it, unless it died silently or the way to them is cut."""
        if machine.silent:
            return
        for stream in list(self._streams):
            if machine in stream.machines:
                stream.tell_dead(machine)

    def forget(self, stream: Stream) -> None:
        self._streams.pop(stream, None)


class Stream:
    """Two lanes. `broken`: both ends raise LinkClosed, whatever was on its way."""

    def __init__(self, network: Network, source: Machine, target: Machine) -> None:
        self.network = network
        self.machines = (source, target)
        forth, back = _Lane(self, source, target), _Lane(self, target, source)
        self.ends = (SimLink(self, forth, back), SimLink(self, back, forth))

    def break_off(self, reason: str = "the connection was reset") -> None:
        self.network.forget(self)
        for end in self.ends:
            end.outgoing.shut(reason)
            end.outgoing.end(reason, at_once=True)

    def break_end(self, end: int) -> None:
        """One end breaks, and answers what still comes to it with a reset."""
        reason = "the connection was reset"
        self.ends[end].outgoing.shut(reason)
        incoming = self.ends[1 - end].outgoing
        incoming.end(reason, at_once=True)
        incoming.refuses = True

    def tell_dead(self, machine: Machine) -> None:
        """A reset travels from the dead machine to the other one."""
        peer = self.machines[machine is self.machines[0]]
        if not peer.alive:
            self.network.forget(self)
            return
        lane = self.ends[machine is self.machines[1]].outgoing
        lane.post(_Reset())

    def answer_reset(self, lane: _Lane) -> None:
        self.ends[lane is self.ends[0].outgoing].outgoing.post(_Reset())


class _Signal:
    """An event of the stream itself, beside the messages that it carries."""


class _Opening(_Signal):
    """The head of a call: the far end begins to serve it."""

    def __init__(self, stream: Stream, serve: Service, name: str) -> None:
        self.stream = stream
        self.serve = serve
        self.name = name


class _End(_Signal):
    """The sender has closed the stream."""


class _Reset(_Signal):
    """The sender is dead, and its system says so."""


class _Lane:
    """One direction. `arrived` waits for the receiver; after `shut` nothing is sent, after `end`
    nothing is received any more."""

    def __init__(self, stream: Stream, source: Machine, target: Machine) -> None:
        self.stream = stream
        self.network = stream.network
        self.source = source
        self.target = target
        self.way = (source.address, target.address)
        self.arrived: deque[Any] = deque()
        self.closed = ""  # why nothing more may be sent
        self.ended = ""  # why nothing more comes
        self.refuses = False  # the receiver's end is broken, the sender may not know yet
        self.on_its_way = 0
        self._held: deque[Any] = deque()
        self._last_arrival_s = 0.0
        self.on_end: Callable[[], object] | None = None
        self._receiver: asyncio.Future[None] | None = None
        self._sender: asyncio.Future[None] | None = None

    async def put(self, message: Any) -> None:
        while not self.closed and len(self.arrived) + self.on_its_way >= LANE_MESSAGES:
            self._sender = self.network.loop.create_future()
            await self._sender
        if self.closed:
            raise LinkClosed(self.closed)
        if self.network.withheld:
            waiting = self.network.withheld.get((*self.way, kind_of(message)))
            if waiting is not None:
                waiting.append((self, message))
                return
        self.post(message)

    def post(self, message: Any) -> None:
        network, loop = self.network, self.network.loop
        at = loop.world_s + network.delay_s(self.source, self.target)
        self._last_arrival_s = at = max(at, self._last_arrival_s + NEXT_S)
        self.on_its_way += 1
        loop.call_world(at, self._arrive, message)

    async def get(self) -> Any:
        while not self.arrived:
            if self.ended:
                raise LinkClosed(self.ended)
            self._receiver = self.network.loop.create_future()
            await self._receiver
        if self._sender is not None:
            _wake(self._sender)
        return self.arrived.popleft()

    def shut(self, reason: str) -> None:
        self.closed = self.closed or reason
        _wake(self._sender)

    def end(self, reason: str, *, at_once: bool = False) -> None:
        """`at_once`: what has arrived is not received either."""
        if at_once:
            self.arrived.clear()
        self.ended = self.ended or reason
        _wake(self._receiver)
        if self.on_end is not None:
            self.on_end()

    def release(self) -> None:
        """The cut is healed: what was held arrives after another delay, and behind it what
        comes until then."""
        network, loop = self.network, self.network.loop
        loop.call_world(loop.world_s + network.delay_s(self.source, self.target), self._let_in)

    def _let_in(self) -> None:
        if self.way in self.network.cuts:
            self.network.hold(self)
            return
        held, self._held = self._held, deque()
        for message in held:
            self._take(message)

    def _arrive(self, message: Any) -> None:
        if self._held or self.way in self.network.cuts:
            if not self._held:
                self.network.hold(self)
            self._held.append(message)
        else:
            self._take(message)

    def _take(self, message: Any) -> None:
        network = self.network
        self.on_its_way -= 1
        if not self.target.alive:
            successor = network.services[self.target.address][0] is not self.target
            if (successor or not self.target.silent) and not isinstance(message, _Reset):
                self.stream.tell_dead(self.target)
        elif isinstance(message, _Reset):
            self.stream.break_off()
        elif self.refuses:
            self.stream.answer_reset(self)
        elif isinstance(message, _Signal):
            self._take_signal(message)
        elif not self.ended:
            self.arrived.append(message)
            _wake(self._receiver)

    def _take_signal(self, signal: _Signal) -> None:
        if isinstance(signal, _Opening):
            if not self.ended:
                self.target.spawn(signal.serve(signal.stream.ends[1]), signal.name)
        else:
            self.network.forget(self.stream)
            self.end("the peer ended the stream")
            near = self.stream.ends[self.source is self.stream.machines[0]]
            near.outgoing.shut("the peer ended the stream")


class SimLink:
    """One end of a stream; implements `runtime.links.Link`."""

    def __init__(self, stream: Stream, outgoing: _Lane, incoming: _Lane) -> None:
        self.outgoing = outgoing
        self.send = outgoing.put
        self.receive = incoming.get
        self._incoming = incoming
        self._stream = stream
        self.closed = False

    def tell_end(self, callback: Callable[[], object] | None) -> None:
        """Call it when nothing comes from the peer any more; at once if that is so already."""
        self._incoming.on_end = callback
        if callback is not None and self._incoming.ended:
            callback()

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if not self.outgoing.closed:
            self.outgoing.post(_End())
        self.outgoing.shut("this side ended the stream")
        self._incoming.end("this side ended the stream", at_once=True)


def kind_of(message: Any) -> str:
    """The type of a stream's message: the name of its one field, or of what has no such field."""
    if isinstance(message, worker_pb2.BlockEvents):
        return "snapshot" if message.snapshot else "delta"
    if isinstance(message, handoff_pb2.HandshakeMessage):
        return "handshake"
    return str(message.WhichOneof("kind"))


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
