"""What a router learns of its workers' times from load reports and timelines."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from baton.planner.live_timing import PRIOR, REFIT_S
from baton.proto import worker_pb2
from baton.router.fleet.fleet_timing import FleetTiming
from baton.router.fleet.worker_costs import Pair
from baton.router.fleet.worker_view import kv_format_of
from baton.runtime.config import StepConfig
from tests.support.fleet_scene import FleetScene
from tests.support.placement_scene import NEED, place, view
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually

BOOT = bytes(16)


def hello(role: str = "prefill", **fields: Any) -> worker_pb2.WorkerHello:
    facts: dict[str, Any] = {
        "role": role,
        "model_fingerprint": "f",
        "kv_dtype": "d",
        "block_size": 16,
    }
    return worker_pb2.WorkerHello(**{**facts, **fields})


def step(number: int, tokens: int, sequences: int, seconds: float) -> worker_pb2.StepTime:
    return worker_pb2.StepTime(
        number=number,
        prompt_tokens=tokens,
        pairs=tokens * (tokens + 1) // 2,
        sequences=sequences,
        context_tokens=100 * sequences,
        micros=round(seconds * 1e6),
    )


def report(timing: FleetTiming, name: str, role: str, number: int, seconds: float) -> None:
    load = worker_pb2.Load()
    if role == "prefill":
        load.chunk_step.CopyFrom(step(number, 500, 0, seconds))
    else:
        load.decode_step.CopyFrom(step(number, 0, 8, seconds))
    timing.record_load(name, BOOT, hello(role), load)


def test_workers_that_are_alike_have_the_same_costs() -> None:
    timing = FleetTiming(StepConfig(chunk_tokens=32, prefill_tokens=64))
    found = timing.costs_of("p0", hello())
    assert found is timing.costs_of("p1", hello())
    assert (found.timing, found.chunk_tokens, found.step_tokens) == (PRIOR, 32, 64)
    stated = timing.costs_of("p2", hello(step_tokens=8192, chunk_tokens=4096))
    assert (stated.step_tokens, stated.chunk_tokens) == (8192, 4096)
    decodes = timing.costs_of("d0", hello("decode"))
    assert decodes.step_tokens == decodes.chunk_tokens == StepConfig().local_prefill_tokens
    assert timing.costs_of("q0", hello(model_fingerprint="g")) is not found


def test_steps_change_the_costs_of_a_format_at_the_next_fit() -> None:
    timing = FleetTiming(StepConfig())
    before = timing.costs_of("p0", hello())
    for number in range(1, 20):
        report(timing, "p0", "prefill", number, 1.0)
    assert timing.costs_of("p0", hello()) is before
    timing.refit(0.0)
    found = timing.costs_of("p0", hello())
    assert found.compute_us(0, 256) > 5 * before.compute_us(0, 256)
    other = timing.costs_of("q0", hello(model_fingerprint="g"))
    assert other.timing is PRIOR


def test_a_slower_worker_has_its_own_pace() -> None:
    timing = FleetTiming(StepConfig())
    for number in range(1, 200):
        for name, seconds in (("p0", 0.1), ("p1", 0.1), ("p2", 0.1), ("p3", 0.3)):
            report(timing, name, "prefill", number, seconds)
        timing.refit(2.0 * number)
    paces = {name: timing.costs_of(name, hello()).pace for name in ("p0", "p1", "p2", "p3")}
    assert paces["p0"] == paces["p1"] == paces["p2"]
    assert 2.0 < paces["p3"] / paces["p0"] < 4.5
    quick, slow = timing.costs_of("p0", hello()), timing.costs_of("p3", hello())
    assert quick.compute_us(0, 500) == pytest.approx(100_000, rel=0.7)
    assert slow.compute_us(0, 500) > 2 * quick.compute_us(0, 500)


def test_a_repeated_report_counts_once_and_a_restart_is_new() -> None:
    timing = FleetTiming(StepConfig())
    for number in range(1, 50):
        report(timing, "p1", "prefill", number, 0.1)
    timing.refit(0.0)
    for _ in range(100):
        report(timing, "p0", "prefill", 1, 0.4)
    assert timing.costs_of("p0", hello()).pace == 1.0  # of one step
    for number in range(2, 100):
        report(timing, "p0", "prefill", number, 0.4)
    assert timing.costs_of("p0", hello()).pace > 2.0
    load = worker_pb2.Load(chunk_step=step(1, 500, 0, 0.1))
    timing.record_load("p0", b"another boot....", hello(), load)
    assert timing.costs_of("p0", hello()).pace == 1.0
    timing.forget("p0")
    assert timing.costs_of("p0", hello()).pace == 1.0


def test_an_impossible_step_is_not_believed() -> None:
    timing = FleetTiming(StepConfig())
    load = worker_pb2.Load()
    load.chunk_step.CopyFrom(worker_pb2.StepTime(number=1, prompt_tokens=1, pairs=1 << 60))
    timing.record_load("p0", BOOT, hello(), load)
    timing.refit(0.0)
    assert timing.costs_of("p0", hello()).timing is PRIOR


def timelines() -> list[worker_pb2.Timeline]:
    first = worker_pb2.Timeline(peer="p0", peer_first=2, peer_end=3)
    for name, micros in (
        (worker_pb2.CREDIT_WAIT, 900_000),
        (worker_pb2.CONNECT, 800_000),  # a first contact
        (worker_pb2.OPEN, 1_000),
        (worker_pb2.CHUNK, 700_000),
        (worker_pb2.FIRST_TOKEN, 3_000),
    ):
        first.names.append(name)
        first.micros.append(micros)
        first.counts.append(0)
    second = worker_pb2.Timeline()
    second.fetch.bytes = 10 * 16 * 500
    second.fetch.begin_us.extend([0, 1_000_000])
    second.fetch.landed_us.extend([10_000, 1_030_000])
    second.fetch.blocks.extend([4, 6])
    return [first, second]


def test_handoffs_are_learned_from_both_timelines_of_a_request() -> None:
    timing, kv_format = FleetTiming(StepConfig()), kv_format_of(hello())
    for timeline in timelines():
        timing.record_handoff(kv_format, timeline, 0.0)
    timing.refit(0.0)
    costs = timing.costs_of("p0", hello())
    assert costs.handoff_us == 4_000
    assert costs.read_us(160) == 40_000  # ten blocks in 40 ms


def test_reads_are_learned_by_distance() -> None:
    timing, kv_format = FleetTiming(StepConfig()), kv_format_of(hello())
    _, second = timelines()
    timing.record_handoff(kv_format, second, 0.0)
    second.fetch.landed_us[:] = [10_000, 1_370_000]  # 380 ms
    timing.record_handoff(kv_format, second, 0.0, distance=2)
    timing.refit(0.0)
    costs = timing.costs_of("p0", hello())
    assert costs.read_us(160, Pair(distance=0)) == 40_000
    assert costs.read_us(160, Pair(distance=2)) == 380_000


def test_a_bad_handoff_keeps_prompts_local_for_minutes_only() -> None:
    """Nothing but another handoff shows that they take less now."""
    timing, kv_format = FleetTiming(StepConfig()), kv_format_of(hello())

    def record(seconds: float, now_s: float) -> None:
        timeline = worker_pb2.Timeline(peer="p0")
        timeline.names.append(worker_pb2.OPEN)
        timeline.micros.append(round(seconds * 1e6))
        timing.record_handoff(kv_format, timeline, now_s)

    def local(now_s: float) -> bool:
        timing.refit(now_s)
        decode = view("decode-0", costs=timing.costs_of("d0", hello("decode")))
        prefill = view("prefill-0", costs=timing.costs_of("p0", hello()))
        return place(NEED, [decode, prefill], "auto").local

    assert not local(0.0)
    record(3.0, 1.0)
    assert local(5.0) and local(120.0)
    assert not local(600.0)
    record(3.0, 601.0)
    assert local(605.0)  # one is enough
    assert not local(1200.0)
    record(0.004, 1201.0)
    assert not local(1205.0) and not local(10_000.0)


def test_costs_know_the_objective() -> None:
    timing = FleetTiming(StepConfig(), 0.05)
    assert timing.costs_of("d0", hello("decode")).itl_s == 0.05
    assert FleetTiming(StepConfig()).costs_of("d0", hello("decode")).itl_s == math.inf


def test_malformed_timelines_say_nothing() -> None:
    timing, kv_format = FleetTiming(StepConfig()), kv_format_of(hello())
    first, second = timelines()
    first.micros.append(1)
    timing.record_handoff(kv_format, first, 0.0)
    second.fetch.blocks.append(1)
    timing.record_handoff(kv_format, second, 0.0)
    _, large = timelines()
    large.fetch.bytes = 1 << 60
    timing.record_handoff(kv_format, large, 0.0)
    timing.record_handoff(kv_format, worker_pb2.Timeline(), 0.0)  # of a local prefill
    timing.refit(0.0)
    assert timing.costs_of("p0", hello()).timing is PRIOR


@on_virtual_time
async def test_reads_count_at_the_distance_of_their_workers(
    fleet_scene: type[FleetScene],
) -> None:
    scene = fleet_scene()
    scene.add("decode-0", 1, topology="zone-a/rack-1/host-1")
    granter = scene.add("prefill-0", 2, topology="zone-a/rack-2/host-1")
    await eventually(lambda: len(scene.names()) == 2)
    decode = scene.fleet.link("decode-0")
    assert decode is not None and decode.worker_hello is not None
    timeline = worker_pb2.Timeline()
    timeline.fetch.begin_us.append(0)
    timeline.fetch.landed_us.append(3000)
    timeline.fetch.blocks.append(1)
    timeline.fetch.bytes = 1_000_000
    scene.fleet.record_handoff(decode, timeline, granter.boot_id)
    scene.fleet.record_handoff(None, timeline, granter.boot_id)  # its worker has just left
    await asyncio.sleep(2 * REFIT_S)
    scene.fleet.roster()
    costs = scene.fleet.timing.costs_of("decode-0", decode.worker_hello)
    assert costs.byte_s[2] == pytest.approx(3e-9)
    topologies = {each.worker_id: each.topology for each in scene.fleet.views()}
    assert topologies["decode-0"] == "zone-a/rack-1/host-1"
    assert topologies["prefill-0"] == "zone-a/rack-2/host-1"


@on_virtual_time
async def test_a_link_that_breaks_for_a_moment_keeps_the_pace(
    fleet_scene: type[FleetScene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, forgotten = fleet_scene(), list[str]()
    worker = scene.add("decode-0")
    await eventually(lambda: scene.names() == ["decode-0"])
    monkeypatch.setattr(scene.fleet.timing, "forget", forgotten.append)
    await worker.ends[-1].close()
    await eventually(lambda: scene.names() == [])
    await eventually(lambda: scene.names() == ["decode-0"])
    assert forgotten == []
    scene.registry.withdraw("decode-0", worker.boot_id.hex())
    worker.reachable = False
    await worker.ends[-1].close()
    await eventually(lambda: scene.fleet.link("decode-0") is None)
    assert scene.names() == [] and forgotten == ["decode-0"]
