"""A registry whose file system hangs, as a read that never ends: requests and links go on."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from baton.runtime.registry import WorkerRecord
from tests.support.router_process import StartRouter
from tests.support.waiting import eventually


class Pipe:
    """Reading it waits until `fill`."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.reads = 0

    def workers(self) -> list[WorkerRecord]:
        self.reads += 1
        os.read(self.reader, 1)
        raise OSError(116, "Stale file handle")

    def close(self) -> None:
        os.close(self.writer)


async def test_requests_go_on_while_the_registry_hangs(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with router() as running:
        with closing(Pipe()) as pipe, monkeypatch.context() as hanging:
            hanging.setattr(running.registry, "workers", pipe.workers)
            await eventually(lambda: pipe.reads)
            for _ in range(5):
                answer = await running.complete(max_tokens=4)
                assert answer.status_code == 200
                assert answer.json()["usage"]["completion_tokens"] == 4
            # its link broke: it is dialled again though the registry says nothing
            running.workers["decode-0"].break_links()
            await running.ready()
            assert (await running.complete(max_tokens=4)).status_code == 200
            assert pipe.reads == 1
        assert (await running.complete(max_tokens=4)).status_code == 200
