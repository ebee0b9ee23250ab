"""Check that no worker keeps as exact what it has read from KV in eight bits.

The lab's wide records lose nothing when they are made of narrow ones, so no token would be wrong:
what is published is looked at instead. A block that was read for a handoff that failed, and was
then computed here as a whole, is exact. Sits on READs, steps and pools of one world, and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.engine.scheduling.batch import StepBatch
from baton.engine.scheduling.blocks import Hold
from baton.kv_transfer.memory_mover import Attempt
from baton.simulation.fleet.world import WorkerProcess, World
from baton.simulation.virtual.virtual_steps import VirtualStep


class Precision:
    """`breaches` gets a line for each block that is published and must not be."""

    def __init__(self, world: World, breaches: list[str]) -> None:
        self._world = world
        self._breaches = breaches
        # Boot and block, until it is taken again, and the slots that were computed since the READ.
        self._imprecise: dict[tuple[bytes, int], set[int]] = {}

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
            self._imprecise |= {(attempt.reader, block): set() for block in own}

    def over(self, process: WorkerProcess) -> None:
        """Watch what a wide worker publishes that has just been started."""
        if process.machine.name not in self._world.wide:
            return
        pool, boot_id = process.pool, process.boot_id
        allocate: Callable[[int, Hold], list[int]] = pool.allocate
        identify = pool.identify
        submit: Callable[[StepBatch], VirtualStep] = process.engine.submit

        def submitted(batch: StepBatch) -> VirtualStep:
            for piece in batch.slices:
                for position in range(piece.start, piece.start + len(piece.tokens)):
                    index, slot = divmod(position, pool.block_size)
                    self._computed((boot_id, piece.blocks[index]), slot, pool.block_size)
            return submit(batch)

        def allocated(count: int, hold: Hold) -> list[int]:
            blocks = allocate(count, hold)
            for block in blocks:
                self._imprecise.pop((boot_id, block), None)
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
        process.engine.submit = submitted  # type: ignore[method-assign]

    def _computed(self, location: tuple[bytes, int], slot: int, block_size: int) -> None:
        slots = self._imprecise.get(location)
        if slots is not None:
            slots.add(slot)
            if len(slots) == block_size:
                del self._imprecise[location]
