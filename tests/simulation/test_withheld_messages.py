"""One kind of message withheld: a fleet with such a prefill worker serves all in bounded time.
On virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from google.protobuf.message import Message

from baton.kv_transfer.reader import HandoffReader
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime.config import HandoffConfig
from baton.simulation.fleet.draw_scenario import WITHHELD_EVERY, WITHHELD_SEED, draw
from baton.simulation.fleet.faults import Striker
from baton.simulation.fleet.history import FINISHED, Ask, History, serve
from baton.simulation.fleet.partial_silence import BY_GRANTER, BY_READER, BY_ROUTER, BY_WORKER
from baton.simulation.fleet.scenario import Fault
from baton.simulation.fleet.world import World
from baton.simulation.invariants.checks import Watch
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.network import kind_of
from baton.simulation.virtual.virtual_loop import VirtualLoop

pytestmark = pytest.mark.usefixtures("quiet_logs")

REQUESTS = 40
DEADLINE_S = 300.0
BOUND_S = 3 * HandoffConfig().read_timeout_s
SILENCE_S = 600.0


def fleet(loop: VirtualLoop) -> tuple[World, Watch]:
    """Two prefill workers and a decode worker, whose waiting grants have room for three."""
    made = draw(0).config
    config = replace(
        made,
        router=replace(made.router, max_requests=64, placement="disaggregated"),
        step=replace(made.step, max_queue=64, max_sequences=16, waiting_share=0.25),
        handoff=HandoffConfig(),
    )
    world = World(loop, config, random.Random(1), step_s=0.01)
    watch = Watch(world)
    world.started, world.router_started = watch.over, watch.over_router
    for name in ("p0", "p1"):
        world.start_worker(name, "prefill", 200)
    world.start_worker("d0", "decode", 80)
    world.start_router("r0")
    return world, watch


async def serve_all(world: World) -> list[History]:
    router, histories = world.routers["r0"], []
    for number in range(REQUESTS):
        prompt = tuple((number + index) % 100 for index in range(22))
        ask = Ask(router="r0", prompt=prompt, max_tokens=6, deadline_s=DEADLINE_S)
        history = History(ask, number, asked_s=world.loop.world_s)
        histories.append(history)
        work = serve(router, history, lambda: world.loop.world_s)
        history.task = router.machine.spawn(work, history.request_id)
        await asyncio.sleep(0.02)
    await asyncio.sleep(DEADLINE_S)
    return histories


def took_s(fault: Fault) -> list[float]:
    """How long each of 40 requests takes, all of which finish."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world, watch = fleet(loop)
        with watch.watching_grants():
            await asyncio.sleep(1.0)
            striker = Striker(world, random.Random(2), 0.001, one_sided=True, own_fabric=True)
            decide = world.exchange.decide
            world.exchange.decide = lambda attempt: watch.posted(attempt, decide(attempt))
            watch.strikes(fault)
            striker.strike(fault)
            histories = await serve_all(world)
        assert [history.ends for history in histories] == [[FINISHED]] * REQUESTS
        assert watch.breaches == []
        return [history.ended_s - history.asked_s for history in histories]

    return virtual_loop.run(main())


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault("checksums", ("p0",), SILENCE_S), marks=pytest.mark.nightly),
        Fault("withhold", ("p0", "d0"), SILENCE_S, "checksums"),
        pytest.param(
            Fault("withhold", ("p0", "d0"), SILENCE_S, "first_tokens"), marks=pytest.mark.nightly
        ),
        Fault("withhold", ("p0", "d0"), SILENCE_S, "offer"),
    ],
    ids=str,
)
def test_fleet_serves_all_when_one_granter_withholds(fault: Fault) -> None:
    assert max(took_s(fault)) < BOUND_S


@pytest.mark.nightly
def test_fleet_stands_still_without_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HandoffReader, "_answers_due", lambda self: float("inf"))
    with pytest.raises(AssertionError, match="DeadlineExceeded"):
        took_s(Fault("withhold", ("p0", "d0"), SILENCE_S, "checksums"))


def direction(sender: str, receiver: str) -> str:
    """Of a message, by the names of its two ends."""
    if sender[0] == "r" or receiver[0] == "r":
        return "router to worker" if sender[0] == "r" else "worker to router"
    return "granter to reader" if sender[0] == "p" else "reader to granter"


def test_every_kind_of_message_is_withheld_by_some_seed() -> None:
    """In each direction. The request for block events is the only one that is not: to its router
    its absence is that of the snapshot, which is withheld, and its worker keeps nothing for it."""
    drawn = {
        (direction(*event.does.targets), event.does.what)
        for seed in range(WITHHELD_SEED, 1000, WITHHELD_EVERY)
        for event in draw(seed).faults
        if isinstance(event.does, Fault) and event.does.kind == "withhold"
    }
    streams = {
        "granter to reader": (handoff_pb2.GranterMessage, BY_GRANTER),
        "reader to granter": (handoff_pb2.ReaderMessage, BY_READER),
        "router to worker": (worker_pb2.RouterMessage, BY_ROUTER),
        "worker to router": (worker_pb2.WorkerMessage, BY_WORKER),
    }
    assert drawn == {(way, kind) for way, (_, kinds) in streams.items() for kind in kinds}
    fields = {
        (way, field.name)
        for way, (message, _) in streams.items()
        for field in message.DESCRIPTOR.fields
    }
    # conversations withhold what is held of cached blocks (turns_world.py)
    fields -= {("granter to reader", "held")}
    fields -= {("worker to router", "heartbeat")}  # never sent: a load is one
    handshakes = {("granter to reader", "handshake"), ("reader to granter", "handshake")}
    feeds = {("worker to router", "snapshot"), ("worker to router", "delta")}
    assert drawn == fields | handshakes | feeds


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (worker_pb2.BlockEvents(snapshot=True), "snapshot"),
        (worker_pb2.BlockEvents(), "delta"),
        (handoff_pb2.HandshakeMessage(), "handshake"),
        (handoff_pb2.GranterMessage(checksums=handoff_pb2.Checksums()), "checksums"),
    ],
)
def test_kind_of_a_message_is_its_field(message: Message, kind: str) -> None:
    assert kind_of(message) == kind
