"""The fleet follows the registry, and tells placement what each worker is and holds."""

from __future__ import annotations

import asyncio
import errno

import pytest
from structlog.testing import capture_logs

from baton.proto import worker_pb2
from baton.router.fleet.fleet import REGISTRY_POLL_S
from baton.router.fleet.worker_view import WorkerCapacity
from baton.router.requests.prompt_limits import ContextLimits
from baton.runtime import metrics
from baton.runtime.identity import chain, root
from baton.runtime.registry import WorkerRecord
from tests.support.fleet_scene import FleetScene, wait_estimator
from tests.support.metric_values import metric_value
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually


@on_virtual_time
async def test_workers_come_and_go(fleet_scene: type[FleetScene]) -> None:
    scene = fleet_scene()
    assert scene.fleet.linked_counts() == {"prefill": 0, "decode": 0}
    scene.add("prefill-0")
    await eventually(lambda: scene.names() == ["prefill-0"])
    assert scene.fleet.linked_counts() == {"prefill": 1, "decode": 0}
    decode = scene.add("decode-0")
    await eventually(lambda: scene.names() == ["decode-0", "prefill-0"])
    assert scene.fleet.linked_counts() == {"prefill": 1, "decode": 1}
    scene.registry.withdraw("decode-0", decode.boot_id.hex())
    await asyncio.sleep(0.1)
    assert "decode-0" in scene.names()  # its link is up: the registry is only a hint
    decode.reachable = False
    await decode.ends[-1].close()
    await eventually(lambda: scene.fleet.link("decode-0") is None)
    assert "decode-0" in scene.listener.lost_workers


@on_virtual_time
async def test_a_prefill_worker_that_fits_no_other_is_not_counted(
    fleet_scene: type[FleetScene],
) -> None:
    scene = fleet_scene()
    with capture_logs() as logs:
        scene.add("decode-0")
        scene.add("prefill-0", 2)
        scene.add("prefill-1", 3, kv_dtype="float32")
        await eventually(lambda: len(scene.names()) == 3)
        await eventually(lambda: any("not used" in entry["event"] for entry in logs))
        await asyncio.sleep(0.1)
    assert scene.fleet.linked_counts() == {"prefill": 1, "decode": 1}
    (said,) = [entry for entry in logs if "not used" in entry["event"]]  # once
    assert said["workers"] == {"prefill-1": "KV dtype 'float32', decode workers have 'd'"}


@on_virtual_time
async def test_another_boot_replaces_the_worker(fleet_scene: type[FleetScene]) -> None:
    scene = fleet_scene()
    scene.add("decode-0", 1)
    await eventually(lambda: scene.names() == ["decode-0"])
    other = scene.add("decode-0", 2, address="elsewhere")

    def replaced() -> bool:
        link = scene.fleet.link("decode-0")
        return link is not None and link.up and link.boot_id == other.boot_id

    await eventually(replaced)
    assert "decode-0" in scene.listener.lost_workers


@on_virtual_time
async def test_a_worker_that_changes_its_role_counts_in_the_new_one(
    fleet_scene: type[FleetScene],
) -> None:
    scene = fleet_scene()
    old = scene.add("decode-0", 1)
    await eventually(lambda: scene.fleet.linked_counts() == {"prefill": 0, "decode": 1})
    new = scene.put("decode-0", "prefill", 2)  # before the registry tells of it
    await old.ends[-1].close()
    await eventually(lambda: len(new.ends) > 0)
    assert scene.fleet.linked_counts() == {"prefill": 0, "decode": 0}
    scene.registry.announce(
        WorkerRecord("decode-0", new.boot_id.hex(), "prefill", "decode-0", "", "m", 1)
    )
    await eventually(lambda: scene.fleet.linked_counts() == {"prefill": 1, "decode": 0})
    assert "decode-0" in scene.listener.lost_workers


@on_virtual_time
async def test_a_registry_that_cannot_be_read_ends_no_router(
    fleet_scene: type[FleetScene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left for a moment: the workers that are known stay, new ones come later."""
    scene = fleet_scene()
    scene.add("decode-0")
    await eventually(lambda: scene.names() == ["decode-0"])

    def unreadable() -> list[WorkerRecord]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken, capture_logs() as logs:
        broken.setattr(scene.registry, "workers", unreadable)
        scene.add("decode-1", 2)
        await asyncio.sleep(0.1)
        assert scene.names() == ["decode-0"] and not scene.task.done()
    assert logs[0]["event"] == "registry unreadable"
    assert logs[0]["reason"].endswith("Too many open files")
    await eventually(lambda: scene.names() == ["decode-0", "decode-1"])


@on_virtual_time
async def test_an_entry_takes_no_link_down_that_is_up(fleet_scene: type[FleetScene]) -> None:
    scene = fleet_scene()
    stub = scene.add("decode-0", 1)
    await eventually(lambda: scene.names() == ["decode-0"])
    record = WorkerRecord("decode-0", "9" * 32, "decode", "another", "", "m", 1)
    scene.put("another", "decode", 9, "decode-0")
    scene.registry.announce(record)
    await asyncio.sleep(1.2 * REGISTRY_POLL_S)
    assert [view.boot_id for view in scene.fleet.views()] == [stub.boot_id]
    scene.registry.withdraw("decode-0", record.boot_id)  # nor does its absence
    await asyncio.sleep(1.2 * REGISTRY_POLL_S)
    assert [view.boot_id for view in scene.fleet.views()] == [stub.boot_id]


@on_virtual_time
async def test_a_reused_address_is_not_the_earlier_worker(fleet_scene: type[FleetScene]) -> None:
    scene = fleet_scene()
    scene.put("10.0.0.5:1", "decode", 2, "decode-1")  # the pod that has the address now
    scene.registry.announce(WorkerRecord("decode-0", "1" * 32, "decode", "10.0.0.5:1", "", "m", 1))
    await asyncio.sleep(10.0)
    assert scene.names() == []
    scene.registry.announce(WorkerRecord("decode-1", "2" * 32, "decode", "10.0.0.5:1", "", "m", 1))
    await eventually(lambda: scene.names() == ["decode-1"])


@on_virtual_time
async def test_a_bad_record_harms_no_one(fleet_scene: type[FleetScene]) -> None:
    scene = fleet_scene()
    for boot_id in ("", "xyz", "00"):
        scene.registry.announce(
            WorkerRecord(f"bad{len(boot_id)}", boot_id, "decode", "h", "", "m", 1)
        )
    scene.add("decode-0")
    await eventually(lambda: scene.names() == ["decode-0"])


@on_virtual_time
async def test_views_tell_what_each_worker_holds(fleet_scene: type[FleetScene]) -> None:
    scene = fleet_scene()
    scene.add("decode-0", 1)
    scene.add("decode-1", 2)
    scene.add("decode-2", 3, model_fingerprint="g")
    await eventually(lambda: len(scene.names()) == 3)
    tokens, key = list(range(11)), scene.key
    for name, number, blocks in (("decode-0", 1, 2), ("decode-1", 2, 1), ("decode-2", 3, 2)):
        held = chain(key, root(key, "f", "d", salt=b"s"), tokens, 4)[:blocks]
        snapshot = worker_pb2.BlockEvents(
            boot_id=bytes([number]) * 16, snapshot=True, snapshot_end=True, stored=b"".join(held)
        )
        assert scene.fleet.index.apply(name, snapshot)

    def held_blocks(salt: bytes) -> dict[str, int]:
        held = scene.fleet.holders(tokens, salt, {})
        return {e.worker_id: held(e.kv_format).blocks(e) for e in scene.fleet.views()}

    assert held_blocks(b"s") == {"decode-0": 2, "decode-1": 1, "decode-2": 0}  # another model's KV
    assert set(held_blocks(b"t").values()) == {0}  # another tenant


@on_virtual_time
async def test_room_is_what_the_lines_of_decode_workers_leave(
    fleet_scene: type[FleetScene],
) -> None:
    scene = fleet_scene()
    assert scene.fleet.room() == 0
    scene.add("prefill-0", 3)
    ends = [scene.add(f"decode-{number}", number + 1) for number in range(2)]
    await eventually(lambda: scene.fleet.room() == 2 * scene.config.max_waiting)
    link = scene.fleet.link("decode-0")
    assert link is not None
    link.placed_requests = 12
    assert scene.fleet.room() == 2 * scene.config.max_waiting - 12
    for stub, load in zip(ends, ({"waiting": 600}, {"draining": True}), strict=True):
        await stub.ends[-1].send(worker_pb2.WorkerMessage(load=worker_pb2.Load(**load)))
    await eventually(lambda: scene.fleet.room() == 0)


@on_virtual_time
async def test_a_workers_own_word_does_not_move_it(fleet_scene: type[FleetScene]) -> None:
    """Where handoffs go, the registry says, whatever a worker puts into its hello."""
    scene = fleet_scene()
    assert "handoff_address" not in worker_pb2.WorkerHello.DESCRIPTOR.fields_by_name
    scene.add("prefill-0", 1, address="there")
    await eventually(lambda: scene.names() == ["prefill-0"])
    assert [view.address for view in scene.fleet.views()] == ["there"]


@on_virtual_time
async def test_a_fleet_of_unlike_decode_workers_is_logged_once(
    fleet_scene: type[FleetScene],
) -> None:
    scene = fleet_scene()
    with capture_logs() as reported:
        scene.add("decode-0", 1)
        scene.add("decode-1", 2)
        scene.add("prefill-0", 3, model_fingerprint="g")  # placement passes it over
        await eventually(lambda: len(scene.names()) == 3)
        await asyncio.sleep(0.1)
        assert not [line for line in reported if line["log_level"] == "warning"]
        scene.add("decode-2", 4, model_fingerprint="g")
        scene.add("decode-3", 5, kv_dtype="e")
        await eventually(lambda: len(scene.names()) == 5)
        await asyncio.sleep(0.1)
    warnings = [line for line in reported if line["log_level"] == "warning"]
    assert all(line["event"] == "decode workers mismatched" for line in warnings)
    assert warnings[-1]["workers"] == {
        "f d": ["decode-0", "decode-1"],
        "g d": ["decode-2"],
        "f e": ["decode-3"],
    }
    assert len(warnings) <= 2  # one for each fleet that was seen


@on_virtual_time
async def test_a_worker_of_slow_steps_is_passed_over(
    fleet_scene: type[FleetScene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = fleet_scene()
    monkeypatch.setattr("baton.router.fleet.circuits.SLOW_FOR_S", 0.1)
    stubs = [scene.add(f"decode-{number}", number + 1) for number in range(3)]
    await eventually(lambda: len(scene.names()) == 3)

    def passed_over() -> list[str]:
        over = scene.fleet.passed_over()
        return [view.worker_id for view in scene.fleet.views() if view.boot_id in over]

    for stub, step_ms in zip(stubs, (20.0, 400.0, 25.0), strict=True):
        load = worker_pb2.Load(step_ms=step_ms, running=2)
        await stub.ends[-1].send(worker_pb2.WorkerMessage(load=load))
    await eventually(lambda: passed_over() == ["decode-1"])
    gauge = metrics.CIRCUITS
    await eventually(lambda: metric_value(gauge.labels("open")) == 1)


@on_virtual_time
async def test_limits_are_those_of_the_largest_decode_worker(fleet_scene: type[FleetScene]) -> None:
    scene = fleet_scene()
    assert scene.fleet.limits() == ContextLimits(1000, 300, 1000)
    scene.add("decode-0", max_context=500)
    scene.add("decode-1", 2, max_context=800)
    await eventually(lambda: len(scene.names()) == 2)
    assert scene.fleet.limits() == ContextLimits(800, 300, 500)


@on_virtual_time
async def test_an_unlinked_worker_keeps_its_role_until_it_is_gone(
    fleet_scene: type[FleetScene],
) -> None:
    """Where its link is down, where it is restarted, and where the registry has lost it."""
    scene = fleet_scene()
    fleet = scene.fleet
    scene.add("decode-0", max_context=500)
    large = scene.add("decode-1", 2, max_context=800)
    await eventually(lambda: len(scene.names()) == 2)
    assert fleet.disconnected_capacities() == []
    large.reachable = False
    await large.ends[-1].close()
    await eventually(lambda: scene.names() == ["decode-0"])
    assert fleet.disconnected_capacities() == [WorkerCapacity(4, 9, 800)]
    assert fleet.limits() == ContextLimits(800, 300, 500)
    scene.registry.withdraw("decode-1", large.boot_id.hex())
    await eventually(lambda: fleet.link("decode-1") is None)
    assert fleet.disconnected_capacities() == [WorkerCapacity(4, 9, 800)]
    restarted = scene.add("decode-1", 3, max_context=700)
    restarted.reachable = False
    await eventually(lambda: fleet.link("decode-1") is not None)
    assert fleet.disconnected_capacities() == [WorkerCapacity(4, 9, 800)]
    restarted.reachable = True
    await eventually(lambda: len(scene.names()) == 2)
    assert fleet.disconnected_capacities() == [] and fleet.limits() == ContextLimits(700, 300, 500)


@on_virtual_time
async def test_a_new_worker_not_linked_yet_may_hold_anything(fleet_scene: type[FleetScene]) -> None:
    scene = fleet_scene()
    scene.add("decode-0", max_context=500)
    for number, name in ((2, "decode-1"), (3, "prefill-0")):
        scene.add(name, number).reachable = False
    await eventually(lambda: len(scene.fleet.links()) == 3 and scene.names())
    assert scene.fleet.disconnected_capacities() == [WorkerCapacity()]
    assert scene.fleet.limits() == ContextLimits(1000, 300, 500)


@on_virtual_time
async def test_a_worker_that_became_prefill_holds_no_answer(fleet_scene: type[FleetScene]) -> None:
    scene = fleet_scene()
    old = scene.add("decode-0")
    await eventually(lambda: scene.names() == ["decode-0"])
    new = scene.put("decode-0", "prefill", 2)
    scene.registry.announce(
        WorkerRecord("decode-0", new.boot_id.hex(), "prefill", "decode-0", "", "m", 1)
    )
    await old.ends[-1].close()
    await eventually(lambda: scene.fleet.linked_counts() == {"prefill": 1, "decode": 0})
    assert scene.fleet.disconnected_capacities() == []


@on_virtual_time
async def test_a_worker_with_an_impossible_hello_fails_no_placement(
    fleet_scene: type[FleetScene],
) -> None:
    scene = fleet_scene()
    with capture_logs() as reported:
        scene.add("decode-0")
        bad = scene.add("decode-1", 2, block_size=0)
        await eventually(lambda: scene.names() == ["decode-0"] and len(bad.ends) > 2)
    assert scene.names() == ["decode-0"] and scene.fleet.linked_counts()["decode"] == 1
    (said,) = [
        line for line in reported if line["event"] == "worker refused"
    ]  # once, however often it tries
    assert said["worker_id"] == "decode-1" and said["log_level"] == "error"
    assert said["reason"] == "block_size is 0, not from 1 to 256"
    assert scene.fleet.disconnected_capacities() == []  # no request waits for it
    bad.hello_fields = {}
    await eventually(lambda: scene.names() == ["decode-0", "decode-1"])


@on_virtual_time
async def test_a_draining_worker_does_not_count(fleet_scene: type[FleetScene]) -> None:
    scene = fleet_scene()
    stub = scene.add("decode-0")
    await eventually(lambda: scene.fleet.linked_counts()["decode"] == 1)
    await stub.ends[-1].send(worker_pb2.WorkerMessage(load=worker_pb2.Load(draining=True)))
    await eventually(lambda: scene.fleet.linked_counts()["decode"] == 0)


@on_virtual_time
async def test_a_new_request_is_expected_to_end_where_it_ends_first(
    fleet_scene: type[FleetScene],
) -> None:
    scene = fleet_scene()
    assert scene.fleet.expected_s() == 0
    for number, name in enumerate(("decode-0", "decode-1", "prefill-0")):
        scene.add(name, number)
    await eventually(lambda: len(scene.names()) == 3)
    now_s = asyncio.get_running_loop().time()
    for name, waiting in (("decode-0", 1000), ("decode-1", 500), ("prefill-0", 1)):
        link = scene.fleet.link(name)
        assert link is not None
        pace = wait_estimator(link)
        pace.report(
            worker_pb2.Load(waiting=waiting, open_requests=waiting, completed_requests=1), now_s - 1
        )
        pace.report(
            worker_pb2.Load(waiting=waiting, open_requests=waiting, completed_requests=11), now_s
        )
        link.note_change()
    assert 49 < scene.fleet.expected_s() < 50.2
    link = scene.fleet.link("decode-1")
    assert link is not None
    link.hung = True
    assert 99 < scene.fleet.expected_s() < 100.2


@on_virtual_time
async def test_a_degraded_pair_is_known_while_both_are_linked(
    fleet_scene: type[FleetScene],
) -> None:
    scene = fleet_scene()
    scene.add("prefill-0", 1)
    stub = scene.add("decode-0", 2)
    await eventually(lambda: len(scene.fleet.views()) == 2)
    boots = {view.worker_id: view.boot_id for view in scene.fleet.views()}
    gauge = metrics.DEGRADED_PAIRS

    async def report(*boot_ids: bytes) -> None:
        peers = [worker_pb2.DegradedPeer(boot_id=boot_id) for boot_id in boot_ids]
        load = worker_pb2.Load(degraded_peers=peers)
        await stub.ends[-1].send(worker_pb2.WorkerMessage(load=load))

    await report(boots["prefill-0"], b"gone" * 4, b"no boot id")
    await eventually(lambda: metric_value(gauge) == 1)
    (decode,) = [view for view in scene.fleet.views() if view.role == "decode"]
    assert set(decode.degraded) == {boots["prefill-0"], b"gone" * 4}
    await report()  # measured again, as good
    await eventually(lambda: metric_value(gauge) == 0)
