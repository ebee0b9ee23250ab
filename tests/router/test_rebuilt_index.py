"""When a router that has just begun knows who holds what: whom it waits for, and how long."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.proto import worker_pb2
from baton.runtime.registry import WorkerRecord

BOOT = bytes([1]) * 16  # of stub 1


async def test_the_index_is_rebuilt_once_every_worker_has_told_its_blocks(
    fleet_scene: Any, eventually: Any
) -> None:
    feeds = {}
    for name in ("decode-0", "prefill-0"):
        feeds[name] = fleet_scene.add(name).feed = asyncio.Queue(9)
    await eventually(lambda: len(fleet_scene.names()) == 2)
    for name, end in (("decode-0", True), ("prefill-0", False), ("prefill-0", True)):
        assert not fleet_scene.fleet.rebuilt()
        before = len(fleet_scene.fleet.index)
        stored = bytes([before]) * 16
        feeds[name].put_nowait(
            worker_pb2.BlockEvents(boot_id=BOOT, snapshot=True, snapshot_end=end, stored=stored)
        )
        await eventually(lambda before=before: len(fleet_scene.fleet.index) == before + 1)
    assert fleet_scene.fleet.rebuilt()
    fleet_scene.add("decode-1", number=2)  # who comes later is not waited for
    await eventually(lambda: len(fleet_scene.names()) == 3)
    assert fleet_scene.fleet.rebuilt()


async def test_a_worker_that_cannot_be_linked_is_waited_for_a_moment(
    fleet_scene: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.router.fleet.LINK_S", 0.2)
    fleet_scene.add("decode-0").reachable = False
    await eventually(lambda: "decode-0" in fleet_scene.fleet._links)
    assert not fleet_scene.fleet.rebuilt()
    await eventually(fleet_scene.fleet.rebuilt, 5)


async def test_a_worker_that_does_not_tell_its_blocks_is_not_waited_for_for_ever(
    fleet_scene: Any, eventually: Any
) -> None:
    fleet_scene.fleet._config = replace(fleet_scene.config, rebuild_s=0.2)
    fleet_scene.add("decode-0")
    await eventually(lambda: fleet_scene.names() == ["decode-0"])
    assert not fleet_scene.fleet.rebuilt()
    await eventually(fleet_scene.fleet.rebuilt, 5)


async def test_a_router_without_workers_has_nothing_to_rebuild_yet(
    fleet_scene: Any, eventually: Any
) -> None:
    await eventually(fleet_scene.fleet.rebuilt, 5)
    feed = fleet_scene.add("decode-0").feed
    await eventually(lambda: fleet_scene.names() == ["decode-0"])
    assert not fleet_scene.fleet.rebuilt()
    feed.put_nowait(worker_pb2.BlockEvents(boot_id=BOOT, snapshot=True, snapshot_end=True))
    await eventually(fleet_scene.fleet.rebuilt, 5)


async def test_a_registry_that_was_never_read_is_no_empty_one(
    fleet_scene: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a router that begins without descriptors would say its index is rebuilt, of nobody."""
    tries = []

    def unreadable() -> list[WorkerRecord]:
        tries.append(len(tries))
        raise OSError(errno.EMFILE, "Too many open files")

    await fleet_scene.end()
    with monkeypatch.context() as broken:
        broken.setattr(fleet_scene.registry, "workers", unreadable)
        fleet_scene.begin()
        await eventually(lambda: len(tries) > 3)
        assert not fleet_scene.fleet.rebuilt()
    await eventually(fleet_scene.fleet.rebuilt)


async def test_the_index_is_rebuilt_though_nobody_asks(fleet_scene: Any, eventually: Any) -> None:
    with capture_logs() as logs:
        feed = fleet_scene.add("decode-0").feed
        feed.put_nowait(worker_pb2.BlockEvents(boot_id=BOOT, snapshot=True, snapshot_end=True))
        await eventually(lambda: "index rebuilt" in [line["event"] for line in logs])
    fleet_scene.add("decode-1", number=2)
    await eventually(lambda: len(fleet_scene.names()) == 2)
    assert fleet_scene.fleet.rebuilt()
