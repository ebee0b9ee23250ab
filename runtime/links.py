"""The `Link` seam: messages between processes, in order, until one side ends it.

Router-worker links and handoff streams are both links. What is above this seam never sees
gRPC; `runtime/grpc_links.py` is the real implementation and `memory_link` the one for tests
and simulation. Time and loss are the concern of the owner of the link: a link reports only
that it is closed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from baton.runtime.errors import WorkerLost

Out = TypeVar("Out", contravariant=True)
In = TypeVar("In", covariant=True)
A = TypeVar("A")
B = TypeVar("B")

MEMORY_LINK_MESSAGES = 1024
LINK_PROTOCOL_VERSION = 1  # of router-worker links; both ends refuse another one


class LinkClosed(WorkerLost):
    """The link has ended: by the peer, by this side, or by the network."""


class Link(Protocol[Out, In]):
    """One end of a duplex stream of messages.

    `send` waits while the peer is slow and raises LinkClosed once the link has ended.
    `receive` returns the next message, or raises LinkClosed; cancelled, it loses no message.
    One task may send while another receives; two tasks must not send, nor receive, at once.
    `close` may be called twice: what was sent before it still reaches a peer that receives;
    this side receives nothing any more.
    """

    async def send(self, message: Out) -> None: ...

    async def receive(self) -> In: ...

    async def close(self) -> None: ...


class MemoryLink(Generic[A, B]):
    """One end of an in-process link; messages pass by reference and are not to be changed."""

    def __init__(self, outgoing: _Lane[A], incoming: _Lane[B]) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._closed = False

    async def send(self, message: A) -> None:
        await self._outgoing.put(message)

    async def receive(self) -> B:
        return await self._incoming.get(abandoned=lambda: self._closed)

    async def close(self) -> None:
        self._closed = True
        self._outgoing.end()
        self._incoming.end()


def memory_link() -> tuple[MemoryLink[A, B], MemoryLink[B, A]]:
    """Both ends of a new in-process link."""
    forth: _Lane[A] = _Lane()
    back: _Lane[B] = _Lane()
    return MemoryLink(forth, back), MemoryLink(back, forth)


class _Lane(Generic[A]):
    """One direction: at most MEMORY_LINK_MESSAGES messages. A message leaves it without a wait
    between its removal and its return, so a cancelled `get` loses none."""

    def __init__(self) -> None:
        self._messages: deque[A] = deque()
        self._ended = False
        self._changed = asyncio.Event()

    async def put(self, message: A) -> None:
        while not self._ended and len(self._messages) >= MEMORY_LINK_MESSAGES:
            await self._change()
        if self._ended:
            raise LinkClosed("the link is closed")
        self._messages.append(message)
        self._changed.set()

    async def get(self, abandoned: Callable[[], bool]) -> A:
        while not self._messages and not self._ended:
            await self._change()
        if abandoned() or not self._messages:
            raise LinkClosed("the link is closed")
        self._changed.set()
        return self._messages.popleft()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
