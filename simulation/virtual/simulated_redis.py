"""A Redis server on simulated machines, and the client that stands in for redis-py's.

    client ── commands ──▶ [on their way] ──▶ executed at once ──▶ replies
           ◀── published ── [on their way] ◀── to each subscriber, in order

It can be killed (and comes back empty), paused, flushed, full, slow, or cut off from one machine:
what is sent in a pause or a cut arrives late, as TCP repeats it. A client gives up after
SOCKET_TIMEOUT_S. Only the commands of RedisRegistry and RedisLeadership are known, and of scripts
those that `scripts` has. Owns keys and subscriptions.
"""

from __future__ import annotations

import asyncio
import fnmatch
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

from redis.exceptions import ConnectionError, OutOfMemoryError, TimeoutError

from baton.runtime import waits
from baton.simulation.virtual.machine import Machine
from baton.simulation.virtual.virtual_loop import VirtualLoop

SOCKET_TIMEOUT_S = 1.5  # of the product's client: registry_location.py
NEXT_S = 1e-9  # between two messages to one subscriber
EPOCH_S = 1_700_000_000  # the server's clock as the world begins
FULL = "command not allowed when used memory > 'maxmemory'."

Command = tuple[Any, ...]  # its name and its arguments
Values = dict[bytes, tuple[bytes, float]]  # with the time of their end


@dataclass(eq=False, slots=True)
class _Call:
    machine: Machine
    commands: list[Command]
    reply: asyncio.Future[list[Any]]


@dataclass(eq=False, slots=True)
class Subscription:
    """One client's connection for what is published. `held`: it waits for a cut to be healed."""

    machine: Machine
    channel: str
    messages: deque[bytes] = field(default_factory=deque)
    held: list[bytes] = field(default_factory=list)
    broken: bool = False
    arrives_s: float = 0.0  # the last message, on the world's clock
    arrival: asyncio.Future[None] | None = None

    def deliver(self, content: bytes) -> None:
        self.messages.append(content)
        self.wake()

    def wake(self) -> None:
        if self.arrival is not None and not self.arrival.done():
            self.arrival.set_result(None)


@dataclass(frozen=True, slots=True)
class Script:
    """`run` gets the values, the time, and the script's keys and arguments. `stores`: a full server
    refuses it."""

    run: Callable[[Values, float, list[bytes], list[bytes]], Any]
    stores: bool


class SimulatedRedis:
    """`delay_s` is drawn for each way between a machine and the server. `written` is called with
    each value that is stored or published, and its time."""

    def __init__(self, loop: VirtualLoop, delay_s: Callable[[Machine], float]) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self.written: Callable[[bytes, float], None] = lambda content, at_s: None
        self.values: Values = {}
        self.scripts: dict[str, Script] = {}  # by their text
        self.up, self.full = True, False
        self.slow_s = 0.0
        self._paused = False
        self._cut: set[str] = set()  # machines, by name
        self._waiting: list[_Call] = []  # while it is paused
        self._held: list[tuple[str, Callable[[], None]]] = []  # on a way that is cut
        self._subscriptions: list[Subscription] = []
        self._starts = 0

    # -- faults -----------------------------------------------------------------------------------

    def kill(self) -> None:
        """End with all connections and all data."""
        self.up = False
        self._starts += 1
        self.values.clear()
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._answer(call, ConnectionError("Connection closed by server."))
        subscriptions, self._subscriptions = self._subscriptions, []
        for one in subscriptions:
            self._on_the_way(one.machine, partial(self._break, one))

    def start(self) -> None:
        self.up = True

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        """Execute what was sent in the pause, though its clients have given up."""
        self._paused = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._execute(call, self._starts)

    def cut(self, name: str) -> None:
        self._cut.add(name)

    def heal(self, name: str) -> None:
        self._cut.discard(name)
        held, self._held = self._held, []
        for machine, arrives in held:
            if machine == name:
                arrives()
            else:
                self._held.append((machine, arrives))

    def usable_by(self, machine: Machine) -> bool:
        """Whether a command of that machine is executed and answered in time."""
        return (
            self.up
            and not self._paused
            and self.slow_s < SOCKET_TIMEOUT_S / 2
            and machine.name not in self._cut
        )

    # -- commands ---------------------------------------------------------------------------------

    def receive(self, call: _Call) -> None:
        """Take commands from a client, on its machine."""
        self._on_the_way(call.machine, lambda: self._arrived(call))

    def write(self, key: bytes, content: bytes, lifetime_s: float, channel: str) -> None:
        """Store and publish a value, as a process that has the server's password can."""
        if self.up and not self._paused:
            self.values[key] = (content, self._loop.world_s + lifetime_s)
            self._publish(channel, content)

    def _arrived(self, call: _Call) -> None:
        if not self.up:
            self._answer(call, ConnectionError("Error 111: Connection refused."))
        elif self._paused:
            self._waiting.append(call)
        elif self.slow_s:
            due_s = self._loop.world_s + self.slow_s
            self._loop.call_world(due_s, self._execute, call, self._starts)
        else:
            self._execute(call, self._starts)

    def _execute(self, call: _Call, starts: int) -> None:
        if starts != self._starts:
            self._answer(call, ConnectionError("Connection closed by server."))
        elif self._paused:
            self._waiting.append(call)
        else:
            self._answer(call, [self._result(call.machine, *one) for one in call.commands])

    def _result(self, machine: Machine, name: str, *arguments: Any) -> Any:
        now_s = self._loop.world_s
        self.values = {key: kept for key, kept in self.values.items() if kept[1] > now_s}
        if name == "set":
            key, content, px = arguments
            if self.full:
                return OutOfMemoryError(FULL)
            self.values[key.encode()] = (content, now_s + px / 1000)
            self.written(content, now_s)
            return True
        if name in ("set if absent", "eval", "get", "time"):
            return self._led(name, *arguments)
        if name == "publish":
            channel, content = arguments
            self.written(content, now_s)
            return self._publish(channel, content)
        if name == "subscribe":
            (subscription,) = arguments
            if machine.alive:
                self._subscriptions.append(subscription)
            return None
        if name == "scan":
            (pattern,) = arguments
            return [key for key in self.values if fnmatch.fnmatchcase(key.decode(), pattern)]
        assert name == "getrange"
        key, first, last = arguments
        return self.values.get(key, (b"", 0.0))[0][first : last + 1]

    def _led(self, name: str, *arguments: Any) -> Any:
        """Execute a command of RedisLeadership."""
        now_s = self._loop.world_s
        if name == "time":
            seconds, part = divmod(EPOCH_S + now_s, 1)
            return int(seconds), int(part * 1e6)
        if name == "get":
            (key,) = arguments
            return self.values[key][0] if key in self.values else None
        if name == "eval":
            text, keys, values = arguments
            script = self.scripts[text]
            if script.stores and self.full:
                return OutOfMemoryError(FULL)
            return script.run(self.values, now_s, keys, values)
        key, content, px = arguments
        if self.full:
            return OutOfMemoryError(FULL)
        if key in self.values:
            return None
        self.values[key] = (content, now_s + px / 1000)
        return True

    def _publish(self, channel: str, content: bytes) -> int:
        self._subscriptions = [e for e in self._subscriptions if e.machine.alive]
        reached = [one for one in self._subscriptions if one.channel == channel]
        for one in reached:
            way_s = self._delay_s(one.machine)
            one.arrives_s = max(self._loop.world_s + way_s, one.arrives_s + NEXT_S)
            self._loop.call_world(one.arrives_s, self._deliver, one, content)
        return len(reached)

    def _deliver(self, one: Subscription, content: bytes) -> None:
        if one.machine.name in self._cut:
            self._held.append((one.machine.name, lambda: one.deliver(content)))
        else:
            one.deliver(content)

    def _break(self, one: Subscription) -> None:
        one.broken = True
        one.wake()

    def _answer(self, call: _Call, answer: list[Any] | Exception) -> None:
        def arrive() -> None:
            if call.reply.done():
                return
            if isinstance(answer, Exception):
                call.reply.set_exception(answer)
                call.reply.exception()  # its client may have given up
            else:
                call.reply.set_result(answer)

        self._on_the_way(call.machine, arrive)

    def _on_the_way(self, machine: Machine, arrives: Callable[[], None]) -> None:
        def arrive() -> None:
            if machine.name in self._cut:
                self._held.append((machine.name, arrives))
            else:
                arrives()

        self._loop.call_world(self._loop.world_s + self._delay_s(machine), arrive)


class SimulatedRedisClient:
    """The part of redis-py's asyncio client that RedisRegistry and RedisLeadership use, on one
    machine."""

    def __init__(self, server: SimulatedRedis, machine: Machine) -> None:
        self._server = server
        self._machine = machine

    def pipeline(self, transaction: bool = True) -> _Pipeline:
        assert not transaction
        return _Pipeline(self)

    def pubsub(self) -> _PubSub:
        return _PubSub(self, self._machine)

    async def scan(self, cursor: int, *, match: str, count: int) -> tuple[int, list[bytes]]:
        (keys,) = await self.call([("scan", match)])
        return 0, keys

    def set(self, key: str, value: str, *, nx: bool, px: int) -> Awaitable[Any]:
        assert nx
        return _Single(self, ("set if absent", key.encode(), value.encode(), px))

    def get(self, key: str) -> Awaitable[Any]:
        return _Single(self, ("get", key.encode()))

    def time(self) -> Awaitable[Any]:
        return _Single(self, ("time",))

    def eval(self, script: str, numkeys: int, *arguments: str | bytes | int) -> Awaitable[Any]:
        sent = [each if isinstance(each, bytes) else str(each).encode() for each in arguments]
        return _Single(self, ("eval", script, sent[:numkeys], sent[numkeys:]))

    async def aclose(self) -> None:
        """Its connections end with its machine."""

    async def call(self, commands: list[Command]) -> list[Any]:
        """Raises redis-py's ConnectionError, or its TimeoutError after SOCKET_TIMEOUT_S."""
        reply: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._server.receive(_Call(self._machine, commands, reply))
        if not await waits.done_within(reply, SOCKET_TIMEOUT_S):
            raise TimeoutError("Timeout reading from the server")
        return reply.result()


@dataclass(frozen=True, slots=True)
class _Single:
    """One command, which is sent as it is awaited: a process that ends before sends none."""

    client: SimulatedRedisClient
    command: Command

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        """Raises what redis-py raises for a refusal."""
        (result,) = await self.client.call([self.command])
        if isinstance(result, Exception):
            raise result
        return result


class _Pipeline:
    def __init__(self, client: SimulatedRedisClient) -> None:
        self._client = client
        self._commands: list[Command] = []

    def set(self, key: str, content: bytes, *, px: int) -> None:
        self._commands.append(("set", key, content, px))

    def publish(self, channel: str, content: bytes) -> None:
        self._commands.append(("publish", channel, content))

    def getrange(self, key: bytes, first: int, last: int) -> None:
        self._commands.append(("getrange", key, first, last))

    async def execute(self, *, raise_on_error: bool) -> list[Any]:
        assert not raise_on_error
        return await self._client.call(self._commands)


class _PubSub:
    def __init__(self, client: SimulatedRedisClient, machine: Machine) -> None:
        self._client = client
        self._machine = machine
        self._subscription: Subscription | None = None

    async def __aenter__(self) -> _PubSub:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._subscription is not None:
            self._subscription.broken = True

    async def subscribe(self, channel: str) -> None:
        self._subscription = Subscription(self._machine, channel)
        await self._client.call([("subscribe", self._subscription)])

    async def get_message(
        self,
        *,
        ignore_subscribe_messages: bool,
        timeout: float,  # noqa: ASYNC109  # as redis-py calls it
    ) -> dict[str, Any] | None:
        assert ignore_subscribe_messages and self._subscription is not None
        one = self._subscription
        if not one.messages and not one.broken:
            one.arrival = asyncio.get_running_loop().create_future()
            await waits.done_within(one.arrival, timeout)
        if one.messages:
            return {"type": "message", "data": one.messages.popleft()}
        if one.broken:
            raise ConnectionError("Connection closed by server.")
        return None
