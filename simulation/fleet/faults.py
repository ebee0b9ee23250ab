"""Carries out faults on a world: what strikes, and what is over after its time.

`Striker` also decides each READ's fate: by the faults that last, and by which process can reach
which. Everything it does is undone by `heal`, except dead processes, which are replaced.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.runtime.errors import DeviceLost
from baton.runtime.registry import Role
from baton.simulation.fleet.redis_faults import RedisFaults
from baton.simulation.fleet.rolling_restart import roll
from baton.simulation.fleet.scenario import BLOCK, Fault
from baton.simulation.fleet.world import World

RANK_HUNG_S = 1.0  # engine.ranks.loading.HUNG_S
TORN = 0.1  # of the READs: some of the blocks come early, and once more with the others


class Striker:
    """One per run; `dice` are its own. `read_s` is a small READ's usual time."""

    def __init__(
        self,
        world: World,
        dice: random.Random,
        read_s: float,
        *,
        one_sided: bool,
        own_fabric: bool,
    ) -> None:
        self._world = world
        self._dice = dice
        self._read_s = read_s
        self._one_sided = one_sided
        self._own_fabric = own_fabric
        self._reads: list[Fault] = []  # that last
        self._undo: dict[int, Callable[[], None]] = {}
        self._homes: dict[str, Role] = {}  # the roles that workers had at first
        self._count = 0
        self.over_s = float("-inf")  # when the last one that struck was over, and what it made late
        self._kinds: dict[str, Callable[[Fault], Callable[[], None]]] = {
            "kill": self._kill,
            "pause": self._pause,
            "slow": self._slow,
            "hang": self._hang,
            "drain": self._drain,
            "role": self._role,
            "cut": self._cut,
            "reset": self._reset,
            "reads": self._spoil,
            "step": self._step,
            "withhold": self._withhold,
            "checksums": self._checksums,
            "registry": self._registry,
            "rank": self._rank,
            "redis": self._redis,
        }
        world.exchange.decide = self._fate
        self.redis = RedisFaults(world.shared, world.loop, dice) if world.shared else None

    def add(self, kind: str, strike: Callable[[Fault], Callable[[], None]]) -> None:
        """Let faults of another kind be carried out by `strike`, which returns what ends them."""
        self._kinds[kind] = strike

    def strike(self, fault: Fault) -> None:
        undo = self._kinds[fault.kind](fault)
        self._count += 1
        number = self._count
        self._undo[number] = undo
        loop = self._world.loop
        loop.call_world(loop.world_s + fault.for_s, self._over, number)

    @property
    def lasting(self) -> bool:
        """Whether any fault is not over yet."""
        return bool(self._undo)

    def heal(self) -> None:
        """End every fault that lasts, and let what is stuck land."""
        for number in list(self._undo):
            self._over(number)
        self._world.exchange.release_stuck()

    def _over(self, number: int) -> None:
        undo = self._undo.pop(number, None)
        if undo is not None:
            self.over_s = max(self.over_s, self._world.loop.world_s)
            undo()
            self._world.exchange.release_stuck(self._reachable)

    # -- faults, each giving what ends it -------------------------------------------------------

    def _kill(self, fault: Fault) -> Callable[[], None]:
        world, (name,) = self._world, fault.targets
        if not world.machine(name).alive:
            return _nothing
        if name in world.workers and world.workers[name].worker.draining.is_set():
            return _nothing  # it goes anyway
        world.kill(name, silent=fault.what == "silently")
        if name in world.routers:
            return lambda: _ignore(world.start_router(name))
        return lambda: world.restart(name)

    def _pause(self, fault: Fault) -> Callable[[], None]:
        machine = self._world.machine(fault.targets[0])
        if not machine.alive:
            return _nothing
        machine.pause()
        return machine.resume

    def _slow(self, fault: Fault) -> Callable[[], None]:
        machine = self._world.machine(fault.targets[0])
        machine.slowness = fault.share

        def usual() -> None:
            machine.slowness = 1.0
            self.over_s += self._world.delay_s * fault.share  # what is on its way comes as slowly

        return usual

    def _hang(self, fault: Fault) -> Callable[[], None]:
        machine = self._world.machine(fault.targets[0])
        machine.hang_s = fault.for_s

        def usual() -> None:
            machine.hang_s = 0.0

        return usual

    def _drain(self, fault: Fault) -> Callable[[], None]:
        self._roll(fault.targets[0])
        return _nothing

    def _roll(self, name: str) -> None:
        world = self._world
        if world.machine(name).alive and not world.workers[name].worker.draining.is_set():
            world.machine(name).spawn(roll(world, name), "drain")

    def _role(self, fault: Fault) -> Callable[[], None]:
        """It drains, and comes back in the other role; after the time, in its first one."""
        world, (name,) = self._world, fault.targets
        before = self._homes.setdefault(name, world.workers[name].role)
        world.roles[name] = "decode" if before == "prefill" else "prefill"
        self._roll(name)

        def back() -> None:
            world.roles[name] = before
            if world.workers[name].role != before:
                self._roll(name)

        return back

    def _cut(self, fault: Fault) -> Callable[[], None]:
        one, other = fault.targets
        ways = [(one, other), (other, one)] if fault.what == "both" else [(one, other)]
        for way in ways:
            self._world.network.cut(*way)

        def heal() -> None:
            for way in ways:
                self._world.network.heal(*way)

        return heal

    def _reset(self, fault: Fault) -> Callable[[], None]:
        self._world.network.reset(*fault.targets, half=fault.what == "one end")
        return _nothing

    def _withhold(self, fault: Fault) -> Callable[[], None]:
        network, way = self._world.network, (*fault.targets, fault.what)
        network.withhold(*way)
        return lambda: network.send_again(*way)

    def _checksums(self, fault: Fault) -> Callable[[], None]:
        mover = self._world.workers[fault.targets[0]].mover
        mover.stick_checksums()
        return mover.release_checksums

    def _rank(self, fault: Fault) -> Callable[[], None]:
        """A rank dies, or stands still."""
        process = self._world.workers[fault.targets[0]]
        if not process.machine.alive:
            return _nothing
        if fault.what == "dies":
            process.engine.lose(DeviceLost("a rank of the worker ended"))
            return _nothing
        process.engine.stall(RANK_HUNG_S, DeviceLost("a rank took no part in a sum in time"))
        return process.engine.go_on

    def _registry(self, fault: Fault) -> Callable[[], None]:
        registry = self._world.client
        if fault.what == "hangs":
            registry.hold()
            return registry.release
        registry.fail()
        return registry.recover

    def _redis(self, fault: Fault) -> Callable[[], None]:
        assert self.redis is not None
        return self.redis.strike(fault)

    def _spoil(self, fault: Fault) -> Callable[[], None]:
        self._reads.append(fault)
        return lambda: self._reads.remove(fault)

    def _step(self, fault: Fault) -> Callable[[], None]:
        engine = self._world.workers[fault.targets[0]].engine
        if fault.what == "fails":
            engine.fail_steps += 1
        elif fault.what == "fails always":
            engine.fail_steps = sys.maxsize
        elif fault.what == "breaks a slice":
            engine.break_slices = {0}
        else:  # a chunk of a block fits, and is tried, or nothing does
            engine.memory_tokens = 0 if fault.what == "no memory at all" else BLOCK

        def usual() -> None:
            engine.fail_steps, engine.break_slices = 0, set()
            engine.memory_tokens = sys.maxsize

        return usual

    # -- READs ----------------------------------------------------------------------------------

    def _reachable(self, attempt: Attempt) -> bool:
        world = self._world
        reader, granter = world.of_boot(attempt.reader), world.of_boot(attempt.granter)
        if not reader.machine.alive or not granter.machine.alive:
            return True  # it fails, or lands in no memory
        ways = ((reader.machine, granter.machine), (granter.machine, reader.machine))
        cuts = world.network.cuts
        if cuts and not self._own_fabric and any(world.network.is_cut(*way) for way in ways):
            return False
        if granter.machine.stopped and not self._one_sided:
            return False
        stuck = (f for f in self._reads if f.what == "stuck")
        return granter.machine.name not in {fault.targets[0] for fault in stuck}

    def _fate(self, attempt: Attempt) -> Fate:
        dice, world = self._dice, self._world
        granter = world.of_boot(attempt.granter)
        delay_s = self._read_s * (1 + attempt.units / 8) * (0.5 + dice.random())
        for fault in self._reads:
            if fault.targets[0] == granter.machine.name and dice.random() < fault.share:
                index = dice.randrange(attempt.units)
                match fault.what:
                    case "failed":
                        return Fate(delay_s, failed=True)
                    case "stuck":
                        return Fate(stuck=True)
                    case "corrupt":
                        bit = dice.randrange(8 * world.kind.block_bytes(BLOCK))
                        return Fate(delay_s, corrupt=index, bit=bit)
                    case "short":
                        return Fate(delay_s, short=index)
                    case "wrong":
                        return Fate(delay_s, wrong=index)
                    case "stale":
                        return Fate(delay_s, stale=self._another(attempt))
        if not self._reachable(attempt):
            return Fate(stuck=True)
        torn = dice.randint(1, attempt.units) if dice.random() < TORN else 0
        return Fate(delay_s, early=torn)

    def _another(self, attempt: Attempt) -> bytes:
        """The pool of another process, as where one has restarted at the same addresses."""
        others = [
            process.boot_id
            for process in self._world.workers.values()
            if process.boot_id not in (attempt.granter, attempt.reader) and process.machine.alive
        ]
        return self._dice.choice(others) if others else attempt.granter


def _nothing() -> None:
    return


def _ignore(_: object) -> None:
    return
