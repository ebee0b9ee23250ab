"""The fleet follows the registry, and tells placement what each worker is and holds."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.proto import worker_pb2
from baton.router.fleet import Fleet
from baton.router.validation import Limits
from baton.runtime import metrics
from baton.runtime.config import RouterConfig
from baton.runtime.identity import chain, cluster_key, root
from baton.runtime.links import LinkClosed, memory_link
from baton.runtime.registry import MemoryRegistry, Role, WorkerRecord
from baton.runtime.wire import ModelLimits

KEY = cluster_key("k")
CONFIG = RouterConfig(link_heartbeat_s=0.02, link_silence_s=5.0, link_grace_s=0.05)


def boot(number: int) -> bytes:
    return bytes([number]) * 16


class Stub:
    """A worker behind memory links: welcomes whoever connects, and keeps the far ends."""

    def __init__(self, role: Role, number: int, **welcome: Any) -> None:
        self.role, self.boot_id, self.welcome = role, boot(number), welcome
        self.ends: list[Any] = []
        self.reachable = True
        self.feed: asyncio.Queue[worker_pb2.BlockEvents] = asyncio.Queue(9)

    def connect(self, address: str) -> Any:
        return self

    def link(self) -> Any:
        if not self.reachable:
            raise LinkClosed("unreachable")
        ends: tuple[Any, Any] = memory_link()
        near, far = ends
        welcome = ModelLimits(300, 1000, "f", "d", KEY).welcome("", self.boot_id, self.role, 4, 9)
        for name, value in self.welcome.items():
            setattr(welcome, name, value)
        self.ends.append(far)
        self.greeting = asyncio.create_task(far.send(worker_pb2.WorkerMessage(welcome=welcome)))
        return near

    async def watch_blocks(self) -> AsyncIterator[worker_pb2.BlockEvents]:
        while True:
            yield await self.feed.get()

    async def close(self) -> None:
        pass


class Dialer:
    def __init__(self) -> None:
        self.stubs: dict[str, Stub] = {}

    def connect(self, address: str) -> Any:
        return self.stubs[address]


class Nobody:
    def __init__(self) -> None:
        self.lost_workers: list[str] = []

    def take(self, link: Any, outputs: Any) -> None:
        raise AssertionError("no outputs are sent here")

    def pending(self, link: Any) -> list[worker_pb2.Resume]:
        return []

    def lost(self, link: Any, request_ids: Any, reason: str) -> None:
        self.lost_workers.append(link.worker_id)

    def hung(self, link: Any) -> None:
        raise AssertionError("nobody hangs here")


class Scene:
    def __init__(self) -> None:
        self.registry, self.dialer, self.bearer = MemoryRegistry(), Dialer(), Nobody()
        self.fleet = Fleet(self.registry, self.dialer, CONFIG, KEY, Limits(1000, 300))
        self.task = asyncio.create_task(self.fleet.run(self.bearer))

    def add(self, name: str, number: int = 1, address: str = "", **welcome: Any) -> Stub:
        role: Role = "prefill" if name.startswith("prefill") else "decode"
        stub = Stub(role, number, **welcome)
        address = address or name
        self.dialer.stubs[address] = stub
        self.registry.announce(WorkerRecord(name, stub.boot_id.hex(), role, address, "", "m", 1))
        return stub

    def names(self) -> list[str]:
        return sorted(view.worker_id for view in self.fleet.views())


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr("baton.router.fleet.POLL_S", 0.02)
    made = Scene()
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


async def test_workers_come_and_go(scene: Scene, eventually: Any) -> None:
    assert scene.fleet.linked() == {"prefill": 0, "decode": 0}
    scene.add("prefill-0")
    await eventually(lambda: scene.names() == ["prefill-0"])
    assert scene.fleet.linked() == {"prefill": 1, "decode": 0}
    decode = scene.add("decode-0")
    await eventually(lambda: scene.names() == ["decode-0", "prefill-0"])
    assert scene.fleet.linked() == {"prefill": 1, "decode": 1}
    scene.registry.withdraw("decode-0", decode.boot_id.hex())
    await asyncio.sleep(0.1)
    assert "decode-0" in scene.names()  # its link is up: the registry is only a hint
    decode.reachable = False
    await decode.ends[-1].close()
    await eventually(lambda: scene.fleet.link("decode-0") is None)
    assert "decode-0" in scene.bearer.lost_workers


async def test_a_prefill_worker_that_fits_no_decode_worker_is_named_and_not_counted(
    scene: Scene, eventually: Any
) -> None:
    with capture_logs() as logs:
        scene.add("decode-0")
        scene.add("prefill-0", 2)
        scene.add("prefill-1", 3, kv_dtype="float32")
        await eventually(lambda: len(scene.names()) == 3)
        await eventually(lambda: any("not used" in entry["event"] for entry in logs))
        await asyncio.sleep(0.1)
    assert scene.fleet.linked() == {"prefill": 1, "decode": 1}
    (said,) = [entry for entry in logs if "not used" in entry["event"]]  # once
    assert said["workers"] == {"prefill-1": "KV dtype 'float32', decode workers have 'd'"}


async def test_another_boot_replaces_the_worker(scene: Scene, eventually: Any) -> None:
    scene.add("decode-0", 1)
    await eventually(lambda: scene.names() == ["decode-0"])
    scene.add("decode-0", 2, address="elsewhere")

    def replaced() -> bool:
        link = scene.fleet.link("decode-0")
        return link is not None and link.up and link.boot_id == boot(2)

    await eventually(replaced)
    assert "decode-0" in scene.bearer.lost_workers


async def test_a_worker_that_changes_its_role_at_its_address_counts_as_what_it_is(
    scene: Scene, eventually: Any
) -> None:
    old = scene.add("decode-0", 1)
    await eventually(lambda: scene.fleet.linked() == {"prefill": 0, "decode": 1})
    new = scene.dialer.stubs["decode-0"] = Stub("prefill", 2)  # before the registry tells of it
    await old.ends[-1].close()
    await eventually(lambda: len(new.ends) > 0)
    assert scene.fleet.linked() == {"prefill": 0, "decode": 0}
    scene.registry.announce(
        WorkerRecord("decode-0", new.boot_id.hex(), "prefill", "decode-0", "", "m", 1)
    )
    await eventually(lambda: scene.fleet.linked() == {"prefill": 1, "decode": 0})
    assert "decode-0" in scene.bearer.lost_workers


async def test_a_registry_that_cannot_be_read_ends_no_router(
    scene: Scene, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left for a moment: the workers that are known stay, new ones come later."""
    scene.add("decode-0")
    await eventually(lambda: scene.names() == ["decode-0"])

    def unreadable() -> list[WorkerRecord]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken, capture_logs() as logs:
        broken.setattr(scene.registry, "workers", unreadable)
        scene.add("decode-1", 2)
        await asyncio.sleep(0.1)
        assert scene.names() == ["decode-0"] and not scene.task.done()
    assert "cannot be read" in logs[0]["event"]
    assert logs[0]["why"].endswith("Too many open files")
    await eventually(lambda: scene.names() == ["decode-0", "decode-1"])


async def test_a_registry_that_was_never_read_is_no_empty_one(
    eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a router that begins without descriptors would say its index is rebuilt, of nobody."""
    monkeypatch.setattr("baton.router.fleet.POLL_S", 0.02)

    def unreadable(_: MemoryRegistry) -> list[WorkerRecord]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(MemoryRegistry, "workers", unreadable)
        made = Scene()
        await asyncio.sleep(0.1)
        assert not made.fleet.rebuilt()
    await eventually(lambda: made.fleet.rebuilt())
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


async def test_a_bad_record_harms_no_one(scene: Scene, eventually: Any) -> None:
    for boot_id in ("", "xyz", "00"):
        scene.registry.announce(
            WorkerRecord(f"bad{len(boot_id)}", boot_id, "decode", "h", "", "m", 1)
        )
    scene.add("decode-0")
    await eventually(lambda: scene.names() == ["decode-0"])


async def test_views_tell_what_each_worker_holds(scene: Scene, eventually: Any) -> None:
    scene.add("decode-0", 1)
    scene.add("decode-1", 2)
    scene.add("decode-2", 3, model_fingerprint="g")
    await eventually(lambda: len(scene.names()) == 3)
    tokens = list(range(11))
    for name, number, blocks in (("decode-0", 1, 2), ("decode-1", 2, 1), ("decode-2", 3, 2)):
        held = chain(KEY, root(KEY, "f", "d", salt=b"s"), tokens, 4)[:blocks]
        snapshot = worker_pb2.BlockEvents(
            boot_id=boot(number), snapshot=True, snapshot_end=True, stored=b"".join(held)
        )
        assert scene.fleet.index.apply(name, snapshot)

    def held_blocks(salt: bytes) -> dict[str, int]:
        views = scene.fleet.views()
        scene.fleet.match(views, tokens, salt, {})
        return {view.worker_id: view.held_blocks for view in views}

    assert held_blocks(b"s") == {"decode-0": 2, "decode-1": 1, "decode-2": 0}  # another model's KV
    assert set(held_blocks(b"t").values()) == {0}  # another tenant


async def test_room_is_what_the_lines_of_decode_workers_leave(
    scene: Scene, eventually: Any
) -> None:
    assert scene.fleet.room() == 0
    scene.add("prefill-0", 3)
    ends = [scene.add(f"decode-{number}", number + 1) for number in range(2)]
    await eventually(lambda: scene.fleet.room() == 2 * CONFIG.max_waiting)
    link = scene.fleet.link("decode-0")
    assert link is not None
    link.placed_requests = 12
    assert scene.fleet.room() == 2 * CONFIG.max_waiting - 12
    for stub, load in zip(ends, ({"waiting": 600}, {"draining": True}), strict=True):
        await stub.ends[-1].send(worker_pb2.WorkerMessage(load=worker_pb2.Load(**load)))
    await eventually(lambda: scene.fleet.room() == 0)


async def test_a_workers_own_word_does_not_move_it(scene: Scene, eventually: Any) -> None:
    """Where handoffs go, the registry says, whatever a worker puts into its welcome."""
    assert "handoff_address" not in worker_pb2.WorkerWelcome.DESCRIPTOR.fields_by_name
    scene.add("prefill-0", 1, address="there")
    await eventually(lambda: scene.names() == ["prefill-0"])
    assert [view.address for view in scene.fleet.views()] == ["there"]


async def test_a_fleet_of_unlike_decode_workers_is_told_of_once(
    scene: Scene, eventually: Any
) -> None:
    with capture_logs() as told:
        scene.add("decode-0", 1)
        scene.add("decode-1", 2)
        scene.add("prefill-0", 3, model_fingerprint="g")  # placement passes it over
        await eventually(lambda: len(scene.names()) == 3)
        await asyncio.sleep(0.1)
        assert not [line for line in told if line["log_level"] == "warning"]
        scene.add("decode-2", 4, model_fingerprint="g")
        scene.add("decode-3", 5, kv_dtype="e")
        await eventually(lambda: len(scene.names()) == 5)
        await asyncio.sleep(0.1)
    warnings = [line for line in told if line["log_level"] == "warning"]
    assert all("different numbers" in line["event"] for line in warnings)
    assert warnings[-1]["workers"] == {
        "f d": ["decode-0", "decode-1"],
        "g d": ["decode-2"],
        "f e": ["decode-3"],
    }
    assert len(warnings) <= 2  # one for each fleet that was seen


async def test_a_worker_of_slow_steps_is_passed_over(
    scene: Scene, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.router.circuits.SLOW_FOR_S", 0.1)
    stubs = [scene.add(f"decode-{number}", number + 1) for number in range(3)]
    await eventually(lambda: len(scene.names()) == 3)

    def passed_over() -> list[str]:
        return [view.worker_id for view in scene.fleet.views() if view.passed_over]

    for stub, step_ms in zip(stubs, (20.0, 400.0, 25.0), strict=True):
        load = worker_pb2.Load(step_ms=step_ms, running=2)
        await stub.ends[-1].send(worker_pb2.WorkerMessage(load=load))
    await eventually(lambda: passed_over() == ["decode-1"])
    gauge: Any = metrics.CIRCUITS
    await eventually(lambda: gauge.labels("open")._value.get() == 1)


async def test_limits_are_those_of_the_smallest(scene: Scene, eventually: Any) -> None:
    assert scene.fleet.limits() == Limits(1000, 300)
    scene.add("decode-0", max_context=500)
    scene.add("decode-1", 2, max_context=2000)
    await eventually(lambda: len(scene.names()) == 2)
    assert scene.fleet.limits() == Limits(500, 300)


async def test_a_worker_whose_welcome_cannot_be_true_fails_no_ones_placement(
    scene: Scene, eventually: Any
) -> None:
    with capture_logs() as told:
        scene.add("decode-0")
        bad = scene.add("decode-1", 2, block_size=0)
        await eventually(lambda: scene.names() == ["decode-0"] and len(bad.ends) > 2)
    assert scene.names() == ["decode-0"] and scene.fleet.linked()["decode"] == 1
    (said,) = [line for line in told if "welcome" in line["event"]]  # once, however often it tries
    assert said["worker_id"] == "decode-1" and said["log_level"] == "error"
    assert said["why"] == "block_size is 0, not from 1 to 256"
    bad.welcome = {}
    await eventually(lambda: scene.names() == ["decode-0", "decode-1"])


async def test_a_draining_worker_does_not_count(scene: Scene, eventually: Any) -> None:
    stub = scene.add("decode-0")
    await eventually(lambda: scene.fleet.linked()["decode"] == 1)
    await stub.ends[-1].send(worker_pb2.WorkerMessage(load=worker_pb2.Load(draining=True)))
    await eventually(lambda: scene.fleet.linked()["decode"] == 0)


async def test_the_index_is_rebuilt_once_every_worker_has_told_its_blocks(
    scene: Scene, eventually: Any
) -> None:
    feeds = {}
    for name in ("decode-0", "prefill-0"):
        feeds[name] = scene.add(name).feed = asyncio.Queue(9)
    await eventually(lambda: len(scene.names()) == 2)
    for name, end in (("decode-0", True), ("prefill-0", False), ("prefill-0", True)):
        assert not scene.fleet.rebuilt()
        before = len(scene.fleet.index)
        stored = bytes([before]) * 16
        feeds[name].put_nowait(
            worker_pb2.BlockEvents(boot_id=boot(1), snapshot=True, snapshot_end=end, stored=stored)
        )
        await eventually(lambda before=before: len(scene.fleet.index) == before + 1)
    assert scene.fleet.rebuilt()
    scene.add("decode-1", number=2)  # who comes later is not waited for
    await eventually(lambda: len(scene.names()) == 3)
    assert scene.fleet.rebuilt()


async def test_a_worker_that_cannot_be_linked_is_waited_for_a_moment(
    scene: Scene, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.router.fleet.LINK_S", 0.2)
    scene.add("decode-0").reachable = False
    await eventually(lambda: "decode-0" in scene.fleet._links)
    assert not scene.fleet.rebuilt()
    await eventually(scene.fleet.rebuilt, 5)


async def test_a_worker_that_does_not_tell_its_blocks_is_not_waited_for_for_ever(
    scene: Scene, eventually: Any
) -> None:
    scene.fleet._config = replace(CONFIG, rebuild_s=0.2)
    scene.add("decode-0")
    await eventually(lambda: scene.names() == ["decode-0"])
    assert not scene.fleet.rebuilt()
    await eventually(scene.fleet.rebuilt, 5)


async def test_a_router_without_workers_has_nothing_to_rebuild_yet(
    scene: Scene, eventually: Any
) -> None:
    await eventually(scene.fleet.rebuilt, 5)
    feed = scene.add("decode-0").feed
    await eventually(lambda: scene.names() == ["decode-0"])
    assert not scene.fleet.rebuilt()
    feed.put_nowait(worker_pb2.BlockEvents(boot_id=boot(1), snapshot=True, snapshot_end=True))
    await eventually(scene.fleet.rebuilt, 5)


async def test_the_index_is_rebuilt_though_nobody_asks(scene: Scene, eventually: Any) -> None:
    with capture_logs() as logs:
        feed = scene.add("decode-0").feed
        feed.put_nowait(worker_pb2.BlockEvents(boot_id=boot(1), snapshot=True, snapshot_end=True))
        await eventually(lambda: "index rebuilt" in [line["event"] for line in logs])
    scene.add("decode-1", number=2)
    await eventually(lambda: len(scene.names()) == 2)
    assert scene.fleet.rebuilt()


async def test_a_new_request_is_expected_to_end_where_it_ends_first(
    scene: Scene, eventually: Any
) -> None:
    assert scene.fleet.expected_s() == 0
    for number, name in enumerate(("decode-0", "decode-1", "prefill-0")):
        scene.add(name, number)
    await eventually(lambda: len(scene.names()) == 3)
    now_s = asyncio.get_running_loop().time()
    for name, waiting in (("decode-0", 1000), ("decode-1", 500), ("prefill-0", 1)):
        pace = scene.fleet._links[name]._pace
        pace.report(worker_pb2.Load(waiting=waiting, ended=1), now_s - 1)
        pace.report(worker_pb2.Load(waiting=waiting, ended=11), now_s)
    assert 49 < scene.fleet.expected_s() < 50.2
    link = scene.fleet.link("decode-1")
    assert link is not None
    link.hung = True
    assert 99 < scene.fleet.expected_s() < 100.2
