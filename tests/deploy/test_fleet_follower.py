"""A fleet whose number a controller changes: what its driver makes and ends, also while the number
cannot be read."""

from __future__ import annotations

from structlog.testing import capture_logs

from baton.deploy.control.fleet_number import FleetSize
from baton.deploy.nodes.fleet_driver import FleetDriver
from baton.deploy.nodes.fleet_follower import FleetFollower
from baton.deploy.nodes.fleet_plan import FleetOptions
from baton.runtime.errors import BatonError, Unavailable
from baton.runtime.settings.loading import load
from tests.support.scripted_actors import ScriptedActors
from tests.support.scripted_number import ScriptedNumber

CONFIG = load(None, {}, {"registry.location": "redis://r:6379/0"})
OPTIONS = FleetOptions(CONFIG, {}, prefill=1, decode=2)


class Scene:
    def __init__(self, number: ScriptedNumber | None = None, decode: int = 2) -> None:
        self.number = number or ScriptedNumber()
        self.fleet = ScriptedActors()
        self.start(decode)

    def start(self, decode: int, prefill: int = 1) -> None:
        """Start `baton fleet --follow`, in place of one that has ended."""
        options = FleetOptions(CONFIG, {}, prefill=prefill, decode=decode)
        self.follower = FleetFollower(self.number, options)
        self.driver = FleetDriver(self.fleet, options.orders(), dict, lambda: 0.0)

    async def turn(self, count: int = 2) -> set[str]:
        """Take turns as the process does; return the workers that there are."""
        for _ in range(count):
            if (orders := await self.follower.orders()) is not None:
                self.driver.follow(orders)
                self.driver.turn()
        return self.fleet.names()


def names(decode: int) -> set[str]:
    return {"prefill-0", *(f"decode-{number}" for number in range(decode))}


async def test_a_fleet_begins_with_its_command_line_and_follows() -> None:
    scene = Scene()
    assert await scene.turn() == names(2)
    assert scene.number.size == FleetSize(1, 2)
    scene.number.size = FleetSize(1, 4)
    assert await scene.turn() == names(4)
    scene.number.size = FleetSize(1, 3)
    assert await scene.turn() == names(3)
    assert scene.fleet.ended[0] == "decode-3"


async def test_a_driver_that_starts_again_keeps_what_was_asked_for() -> None:
    scene = Scene()
    await scene.turn()
    scene.number.size = FleetSize(1, 4)
    await scene.turn()
    scene.start(decode=2)
    assert await scene.turn() == names(4) and scene.fleet.ended == []


async def test_a_driver_that_cannot_read_the_number_ends_no_worker() -> None:
    """Its command line says two; four were asked for before it was started again."""
    scene = Scene()
    scene.number.size = FleetSize(1, 4)
    await scene.turn()
    scene.number.fault = Unavailable("the registry's server does not answer")
    scene.start(decode=2)
    assert await scene.follower.orders() is None
    assert await scene.turn() == names(4)
    scene.number.fault = None
    assert await scene.turn() == names(4) and scene.fleet.ended == []


async def test_a_number_that_gets_lost_is_written_again() -> None:
    scene = Scene()
    scene.number.size = FleetSize(1, 4)
    await scene.turn()
    for fault in (BatonError("it is not signed"), Unavailable("no answer")):
        scene.number.fault = fault
        assert await scene.turn() == names(4)
    scene.number.fault, scene.number.size = None, None
    assert await scene.turn() == names(4)
    assert scene.number.size == FleetSize(1, 4)


async def test_a_foreign_number_ends_no_worker() -> None:
    scene = Scene()
    scene.number.size = FleetSize(1, 4)
    await scene.turn()
    scene.number.foreign = b"a text of another process"
    with capture_logs() as logs:
        assert await scene.turn(5) == names(4) and scene.fleet.ended == []
    (event,) = [each for each in logs if each["event"] == "fleet number not read"]
    assert "delete that key (`redis-cli DEL baton:default:fleet`)" in event["reason"]
    assert scene.number.foreign, "a controller puts it right, or a user"


async def test_the_number_of_prefill_workers_is_the_command_lines() -> None:
    scene = Scene(ScriptedNumber(FleetSize(1, 3)))
    scene.start(decode=2, prefill=2)
    assert await scene.turn() == {*names(3), "prefill-1"}
    assert scene.number.size == FleetSize(2, 3)
