"""Check that no worker keeps as exact what it has read from KV in eight bits.

The lab's wide records lose nothing when they are made of narrow ones, so no token would be wrong:
what is published is looked at instead. Sits on READs and pools of one world, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.engine.scheduling.blocks import Hold
from baton.kv_transfer.memory_mover import Attempt
from baton.simulation.fleet.world import WorkerProcess, World


class Precision:
    """`breaches` gets a line for each block that is published and must not be."""

    def __init__(self, world: World, breaches: list[str]) -> None:
        self._world = world
        self._breaches = breaches
        self._imprecise: set[tuple[bytes, int]] = set()  # boot and block, until it is taken again

    def landing(self, attempt: Attempt) -> None:
        """Record what a wide worker reads from a narrow one."""
        if not self._world.wide or not attempt.checksummed:
            return
        reader, granter = (
            self._world.of_boot(boot_id).machine.name
            for boot_id in (attempt.reader, attempt.granter)
        )
        if reader in self._world.wide and granter not in self._world.wide:
            own = {cell // attempt.joined for cell in attempt.local}
            self._imprecise |= {(attempt.reader, block) for block in own}

    def over(self, process: WorkerProcess) -> None:
        """Watch what a wide worker publishes that has just been started."""
        if process.machine.name not in self._world.wide:
            return
        pool, boot_id = process.pool, process.boot_id
        allocate: Callable[[int, Hold], list[int]] = pool.allocate
        identify = pool.identify

        def allocated(count: int, hold: Hold) -> list[int]:
            blocks = allocate(count, hold)
            self._imprecise -= {(boot_id, block) for block in blocks}
            return blocks

        def identified(
            block: int, identity: bytes, tokens: Sequence[int], tenant: bytes = b""
        ) -> None:
            if (boot_id, block) in self._imprecise:
                self._breaches.append(
                    f"{process.machine.name}: a block is published as exact that was read from "
                    "KV in eight bits"
                )
            identify(block, identity, tokens, tenant)

        # they wrap this instance alone
        pool.allocate = allocated  # type: ignore[method-assign]
        pool.identify = identified  # type: ignore[method-assign]
