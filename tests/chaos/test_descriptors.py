"""A process without a descriptor: it is seen to miss one, has them again, and a limit that does
not bite makes the run void."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from chaos import descriptors
from chaos.clients import Clients
from chaos.cluster import Cluster
from chaos.descriptors import no_descriptors
from chaos.stage import Stage

SERVER = """
import asyncio, os

async def answer(reader, writer):
    while await reader.readline() not in (b"\\r\\n", b""):
        pass
    writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    writer.close()

async def main():
    for number in range(40, 60):
        os.dup2(0, number)  # far above the others, with free ones below
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


class OneRouter:
    """A process that answers, called router. `bites`: whether limits reach it."""

    def __init__(self, process: subprocess.Popen[str], port: int, folder: Path) -> None:
        self.process, self.bites, self.folder = process, True, folder
        self.urls = {"router": f"http://127.0.0.1:{port}"}
        self.limits: list[int] = []

    def pid(self, _: str) -> int:
        return self.process.pid

    def workers(self) -> list[str]:
        return []

    def wait_ready(self, _: int) -> None:
        pass

    def limit(self, _: str, what: int, most: int) -> int:
        self.limits.append(most)
        soft, hard = resource.prlimit(self.process.pid, what)
        if self.bites:
            resource.prlimit(self.process.pid, what, (most, hard))
        return soft


@pytest.fixture
def router(tmp_path: Path) -> Iterator[OneRouter]:
    command = [sys.executable, "-c", SERVER]
    with (
        (tmp_path / "router.log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            yield OneRouter(process, int(process.stdout.readline()), tmp_path)
        finally:
            process.kill()


def stage_of(cluster: OneRouter) -> Stage:
    no_clients = cast(Clients, None)  # this fault asks no client for anything
    return Stage(cast(Cluster, cluster), clients=no_clients, asks=(), longs=(), hold_s=4.0)


async def test_new_connections_fail_while_open_ones_continue(
    router: OneRouter,
) -> None:
    before, _ = resource.prlimit(router.pid(""), resource.RLIMIT_NOFILE)
    stage = stage_of(router)
    await no_descriptors(stage, "router")
    assert not stage.void and not stage.broken
    assert "3 of 3 new connections not answered, 3 of 3 open ones were" in stage.notes[0]
    assert max(router.limits[:-1]) < 40 and router.limits[-1] == before
    assert resource.prlimit(router.pid(""), resource.RLIMIT_NOFILE)[0] == before


async def test_a_limit_that_does_not_bite_makes_the_run_void(router: OneRouter) -> None:
    router.bites = False
    stage = stage_of(router)
    await no_descriptors(stage, "router")
    assert stage.void == "no process was seen to miss a descriptor" and not stage.broken


async def test_a_process_that_answers_no_client_afterwards_is_broken(
    router: OneRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "AGAIN_S", 0.1)
    stage = stage_of(router)
    router.process.send_signal(signal.SIGSTOP)
    await no_descriptors(stage, "router")
    assert "takes no new connection" in stage.broken[0]
    assert stage.void  # it was not for want of a descriptor: its log says nothing
