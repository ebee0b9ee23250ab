"""When a router that has just begun knows which worker holds what: which it waits for, and how
long."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from baton.proto import worker_pb2
from baton.runtime.registry import WorkerRecord
from tests.support.fleet_scene import CONFIG, FleetScene
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually

BOOT = bytes([1]) * 16  # of stub 1


@on_virtual_time
async def test_the_index_is_rebuilt_once_all_workers_reported(
    fleet_scene: type[FleetScene],
) -> None:
    scene = fleet_scene()
    feeds = {}
    for name in ("decode-0", "prefill-0"):
        feeds[name] = scene.add(name).feed = asyncio.Queue(9)
    await eventually(lambda: len(scene.names()) == 2)
    for name, end in (("decode-0", True), ("prefill-0", False), ("prefill-0", True)):
        assert not scene.fleet.rebuilt()
        before = len(scene.fleet.index)
        stored = bytes([before]) * 16
        feeds[name].put_nowait(
            worker_pb2.BlockEvents(boot_id=BOOT, snapshot=True, snapshot_end=end, stored=stored)
        )
        await eventually(lambda before=before: len(scene.fleet.index) == before + 1)
    assert scene.fleet.rebuilt()
    scene.add("decode-1", number=2)  # who comes later is not waited for
    await eventually(lambda: len(scene.names()) == 3)
    assert scene.fleet.rebuilt()


@on_virtual_time
async def test_a_worker_that_cannot_be_linked_is_waited_for_a_moment(
    fleet_scene: type[FleetScene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = fleet_scene()
    monkeypatch.setattr("baton.router.fleet.fleet.REBUILD_LINK_TIMEOUT_S", 0.2)
    scene.add("decode-0").reachable = False
    await eventually(lambda: scene.fleet.link("decode-0") is not None)
    assert not scene.fleet.rebuilt()
    await eventually(scene.fleet.rebuilt, 5)


@on_virtual_time
async def test_a_worker_without_block_reports_is_not_awaited_for_ever(
    fleet_scene: type[FleetScene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_scene, "config", replace(CONFIG, rebuild_s=0.2))
    scene = fleet_scene()
    scene.add("decode-0")
    await eventually(lambda: scene.names() == ["decode-0"])
    assert not scene.fleet.rebuilt()
    await eventually(scene.fleet.rebuilt, 5)


@on_virtual_time
async def test_a_router_without_workers_has_nothing_to_rebuild_yet(
    fleet_scene: type[FleetScene],
) -> None:
    scene = fleet_scene()
    await eventually(scene.fleet.rebuilt, 5)
    feed = scene.add("decode-0").feed
    await eventually(lambda: scene.names() == ["decode-0"])
    assert not scene.fleet.rebuilt()
    feed.put_nowait(worker_pb2.BlockEvents(boot_id=BOOT, snapshot=True, snapshot_end=True))
    await eventually(scene.fleet.rebuilt, 5)


@on_virtual_time
async def test_a_registry_that_was_never_read_is_no_empty_one(
    fleet_scene: type[FleetScene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a router that begins without descriptors would say its index is rebuilt, of no
    worker."""
    scene = fleet_scene()
    tries = []

    def unreadable() -> list[WorkerRecord]:
        tries.append(len(tries))
        raise OSError(errno.EMFILE, "Too many open files")

    await scene.end()
    with monkeypatch.context() as broken:
        broken.setattr(scene.registry, "workers", unreadable)
        scene.begin()
        await eventually(lambda: len(tries) > 3)
        assert not scene.fleet.rebuilt()
    await eventually(scene.fleet.rebuilt)


@on_virtual_time
async def test_the_index_is_rebuilt_without_a_request(fleet_scene: type[FleetScene]) -> None:
    scene = fleet_scene()
    with capture_logs() as logs:
        feed = scene.add("decode-0").feed
        feed.put_nowait(worker_pb2.BlockEvents(boot_id=BOOT, snapshot=True, snapshot_end=True))
        await eventually(lambda: "index rebuilt" in [line["event"] for line in logs])
    scene.add("decode-1", number=2)
    await eventually(lambda: len(scene.names()) == 2)
    assert scene.fleet.rebuilt()
