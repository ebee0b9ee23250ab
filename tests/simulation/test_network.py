"""Simulated streams: in order within each, whatever befalls the way; a Link's own promises.
On virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from baton.runtime.links import LinkClosed
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.machine import Machine
from baton.simulation.virtual.network import LANE_MESSAGES, Network, SimLink
from baton.simulation.virtual.virtual_loop import VirtualLoop

DELAY_S = 0.1


class Scene:
    """Two machines, and what the far one received; `far` is its end of the last stream."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        dice = random.Random(3)
        self.network = Network(loop, lambda source, target: DELAY_S * dice.random())
        self.near_machine = Machine("near", "near")
        self.far_machine = Machine("far", "far")
        self.got: list[object] = []
        self.far: SimLink | None = None
        self.network.listen(self.near_machine, {})
        self.network.listen(self.far_machine, {"take": self.take, "hold": self.hold})

    async def take(self, link: SimLink) -> None:
        self.far = link
        try:
            while True:
                self.got.append(await link.receive())
        except LinkClosed as closed:
            self.got.append(str(closed))

    async def hold(self, link: SimLink) -> None:
        self.far = link
        await asyncio.Event().wait()

    def open(self, service: str = "take") -> SimLink:
        return self.network.connect(self.near_machine, "far", service)


def on_loop(test: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        await test(Scene())

    for seed in range(3):
        virtual_loop.run(main(), seed, shuffle=True)


def test_messages_of_a_stream_arrive_in_order_and_before_its_end() -> None:
    async def test(scene: Scene) -> None:
        near = scene.open()
        for number in range(50):
            await near.send(number)
        await near.close()
        await near.close()
        with pytest.raises(LinkClosed):
            await near.send(51)
        with pytest.raises(LinkClosed):
            await near.receive()
        await asyncio.sleep(1)
        assert scene.got == [*range(50), "the peer ended the stream"]
        assert scene.far is not None
        with pytest.raises(LinkClosed):
            await scene.far.send("too late")

    on_loop(test)


def test_two_streams_overtake_each_other() -> None:
    async def main() -> bool:
        scene = Scene()
        streams = [scene.open() for _ in range(2)]
        for number in range(20):
            for name, stream in enumerate(streams):
                await stream.send((name, number))
                await asyncio.sleep(0.001)
        await asyncio.sleep(1)
        for name in range(2):
            mine = [number for owner, number in scene.got if owner == name]
            assert mine == list(range(20))
        return scene.got != sorted(scene.got, key=lambda entry: entry[1])

    assert any(virtual_loop.run(main(), seed) for seed in range(3))


def test_a_cut_one_way_holds_what_goes_that_way_and_nothing_else() -> None:
    async def test(scene: Scene) -> None:
        near = scene.open()
        await near.send("before")
        await asyncio.sleep(1)
        scene.network.cut("near", "far")
        await near.send("held")
        await near.send("held too")
        assert scene.far is not None
        await scene.far.send("back")
        assert await near.receive() == "back"
        await asyncio.sleep(5)
        assert scene.got == ["before"]
        scene.network.heal("near", "far")
        await near.send("after")
        await asyncio.sleep(1)
        assert scene.got == ["before", "held", "held too", "after"]

    on_loop(test)


def test_two_cuts_of_one_way_need_two_heals() -> None:
    async def test(scene: Scene) -> None:
        for _ in range(2):
            scene.network.cut("near", "far")
        near = scene.open()
        await near.send("held")
        scene.network.heal("near", "far")
        await asyncio.sleep(1)
        assert scene.got == []
        scene.network.heal("near", "far")
        await asyncio.sleep(1)
        assert scene.got == ["held"]

    on_loop(test)


def test_what_was_held_is_not_overtaken_by_what_was_on_its_way() -> None:
    """Of a cut that is shorter than the way."""

    async def test(scene: Scene) -> None:
        scene.network.delay_s = lambda source, target: DELAY_S
        near = scene.open()
        await asyncio.sleep(1)
        await near.send("held")
        await asyncio.sleep(0.6 * DELAY_S)
        scene.network.cut("near", "far")
        await near.send("on its way")
        await asyncio.sleep(0.8 * DELAY_S)
        scene.network.heal("near", "far")
        await near.send("after")
        await asyncio.sleep(0.1 * DELAY_S)
        scene.network.cut("near", "far")  # before what was held has come
        await asyncio.sleep(5)
        assert scene.got == []
        scene.network.heal("near", "far")
        await asyncio.sleep(5)
        assert scene.got == ["held", "on its way", "after"]

    on_loop(test)


def test_a_reset_ends_both_ends_at_once() -> None:
    async def test(scene: Scene) -> None:
        near = scene.open()
        await near.send(1)
        await asyncio.sleep(1)
        assert scene.network.reset("far", "near") == 1
        with pytest.raises(LinkClosed, match="reset"):
            await near.receive()
        with pytest.raises(LinkClosed, match="reset"):
            await near.send(2)
        await asyncio.sleep(1)
        assert scene.got == [1, "the connection was reset"]
        assert scene.network.reset("far", "near") == 0

    on_loop(test)


def test_a_waiter_learns_of_a_reported_death_only() -> None:
    async def test(scene: Scene) -> None:
        near = scene.open("hold")
        await asyncio.sleep(1)
        scene.far_machine.kill(silent=False)
        scene.network.killed(scene.far_machine)
        with pytest.raises(LinkClosed, match="reset"):
            await near.receive()
        refused = scene.open("hold")  # a connection to no server
        with pytest.raises(LinkClosed, match="reset"):
            await refused.receive()

    async def silent(scene: Scene) -> None:
        near = scene.open("hold")
        await asyncio.sleep(1)
        scene.far_machine.kill(silent=True)
        scene.network.killed(scene.far_machine)
        await near.send("into the void")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(near.receive(), 60)
        successor = Machine("far again", "far")
        scene.network.listen(successor, {"take": scene.take})
        await near.send("who is there?")
        with pytest.raises(LinkClosed, match="reset"):
            await near.receive()

    on_loop(test)
    on_loop(silent)


def test_a_paused_process_gets_everything_when_it_goes_on() -> None:
    async def test(scene: Scene) -> None:
        near = scene.open()
        await near.send(1)
        await asyncio.sleep(1)
        scene.far_machine.pause()
        for number in (2, 3):
            await near.send(number)
        await asyncio.sleep(10)
        assert scene.got == [1]
        scene.far_machine.resume()
        await asyncio.sleep(0.01)
        assert scene.got == [1, 2, 3]

    on_loop(test)


def test_a_sender_waits_while_the_receiver_does_not_read() -> None:
    async def test(scene: Scene) -> None:
        near = scene.open("hold")
        for number in range(LANE_MESSAGES - 1):  # the opening is a message too
            await near.send(number)
        await asyncio.sleep(1)
        await near.send("the last one with room")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(near.send("no room"), 5)
        assert scene.far is not None
        assert await scene.far.receive() == 0
        await near.send("room again")

    on_loop(test)


def test_a_cancelled_receive_loses_no_message() -> None:
    async def test(scene: Scene) -> None:
        near = scene.open("hold")
        await asyncio.sleep(1)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(near.receive(), 0.05)
        assert scene.far is not None
        for number in range(5):
            await scene.far.send(number)
        for number in range(5):
            assert await asyncio.wait_for(near.receive(), 1) == number

    on_loop(test)


def test_a_stream_server_learns_its_end_once() -> None:
    async def test(scene: Scene) -> None:
        link = scene.open("hold")
        await asyncio.sleep(2 * DELAY_S)
        assert scene.far is not None
        reported: list[str] = []
        scene.far.tell_end(lambda: reported.append("left"))
        await link.send("a message is no end")
        await asyncio.sleep(2 * DELAY_S)
        assert reported == []
        await link.close()
        await asyncio.sleep(2 * DELAY_S)
        assert reported == ["left"]
        scene.far.tell_end(lambda: reported.append("over before"))
        assert reported == ["left", "over before"]
        scene.far.tell_end(None)
        await scene.far.close()
        assert reported == ["left", "over before"]

    on_loop(test)
