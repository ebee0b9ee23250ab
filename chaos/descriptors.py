"""A process in which no file descriptor is left: no new connection, no new file, while what is
open goes on.

The limit is on the numbers of descriptors: it is the lowest one that is free, and follows what is
closed downwards. Whether it holds is observed twice: new connections are not answered while
the limit holds, and again once it is over; and the process's own log says why. Beside it stands
how often a connection that was open before was answered at the same moment.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from chaos.stage import Stage

ANSWER_S = 1.0  # for a process to say that it lives
AGAIN_S = 5.0  # after the limit: a listener that found no descriptor pauses for a second
OPEN_S = 4.0  # no connection stays silent here for longer: a worker closes it after 5 s
POLL_S = 0.05
SPARE_S = 0.5  # for what is late on a slow machine
NONE_LEFT = os.strerror(errno.EMFILE).encode()

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process says that it lives, by which path."""

    host: str
    port: int
    path: str


async def no_descriptors(stage: Stage, name: str) -> None:
    """Leave no descriptor as long as faults last; the fault is void unless it was seen to bite."""
    address = await stage.do(_address, stage, name)
    log = stage.cluster.folder / f"{name}.log"
    begins = log.stat().st_size
    opened = await _open(stage.cluster.pid(name), address, _pairs(stage.hold_s))
    limiting = asyncio.create_task(_limited(stage, name))
    # The limit has to be in force first.
    await asyncio.sleep(POLL_S)
    news, olds = list[bool](), list[bool]()
    for connection in opened:
        new, old = await asyncio.gather(_answers(address), _answered(connection, address))
        if not limiting.done():  # while the limit held, all the time
            news.append(new)
            olds.append(old)
    await limiting
    if not await _answers_again(address):
        stage.broken.append(f"{name} takes no new connection {AGAIN_S:g} s after the limit")
    await stage.whole()
    heard = await stage.do(_reported, log, begins)
    stage.notes.append(
        f"{news.count(False)} of {len(news)} new connections not answered, {olds.count(True)} of "
        f"{len(olds)} open ones were; {heard} log lines of it"
    )
    if not heard or False not in news:
        stage.void = "no process was seen to miss a descriptor"


def lowest_free(pid: int) -> int:
    """The number that the process's next descriptor would have."""
    taken = _descriptors(pid)
    return next(number for number in itertools.count() if number not in taken)


def _descriptors(pid: int) -> set[int]:
    return {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}


async def _limited(stage: Stage, name: str) -> None:
    clock = asyncio.get_running_loop().time
    pid, until_s = stage.cluster.pid(name), clock() + stage.hold_s
    least = lowest_free(pid)
    before = stage.cluster.limit(name, resource.RLIMIT_NOFILE, least)
    try:
        while clock() < until_s:
            # The kernel does not report that a process has freed a descriptor.
            await asyncio.sleep(POLL_S)
            if (free := lowest_free(pid)) < least:
                least = free
                stage.cluster.limit(name, resource.RLIMIT_NOFILE, least)
    finally:
        stage.cluster.limit(name, resource.RLIMIT_NOFILE, before)


def _address(stage: Stage, name: str) -> Address:
    cluster = stage.cluster
    router = name.startswith("router")
    url = cluster.urls[name] if router else f"http://{cluster.records()[name].admin_address}"
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return Address(parts.hostname, parts.port, "/livez" if router else "/healthz")


def _reported(log: Path, begins: int) -> int:
    """How often a log says from there on that no descriptor was left."""
    with log.open("rb") as file:
        file.seek(begins)
        return sum(line.count(NONE_LEFT) for line in file)


def _pairs(hold_s: float) -> int:
    """How often a new and an open connection can be asked at once under the limit."""
    return max(1, int((min(hold_s, OPEN_S) - SPARE_S) / ANSWER_S))


async def _open(pid: int, address: Address, count: int) -> list[Connection]:
    """Connections that the process itself has taken, not the system for it."""
    clock = asyncio.get_running_loop().time
    before, until_s = len(_descriptors(pid)), clock() + ANSWER_S
    opened = [await _connect(address) for _ in range(count)]
    while len(_descriptors(pid)) < before + count and clock() < until_s:
        # The kernel does not report that a process has accepted a connection.
        await asyncio.sleep(0.005)
    return opened


async def _connect(address: Address) -> Connection:
    return await asyncio.open_connection(address.host, address.port)


async def _answers(address: Address) -> bool:
    """Whether a new connection is answered: the kernel alone takes it, but says nothing."""
    try:
        async with asyncio.timeout(ANSWER_S):
            connection = await _connect(address)
    except (OSError, TimeoutError):
        return False
    return await _answered(connection, address)


async def _answered(connection: Connection, address: Address) -> bool:
    reader, writer = connection
    try:
        async with asyncio.timeout(ANSWER_S):
            writer.write(f"GET {address.path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await writer.drain()
            return (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    except (OSError, TimeoutError):
        return False
    finally:
        writer.transport.abort()


async def _answers_again(address: Address) -> bool:
    clock = asyncio.get_running_loop().time
    until_s = clock() + AGAIN_S
    while not (answered := await _answers(address)) and clock() < until_s:
        # Only a new connection shows whether the process accepts again.
        await asyncio.sleep(POLL_S)
    return answered
