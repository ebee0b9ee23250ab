"""Checks that speculation leaves nothing behind: no blocks of rejected tokens, held or published.

Once a step of a worker that speculates is committed, a sequence holds no block behind its computed
tokens and the next one. A cached block holds the records of the tokens that it is published for.
Nothing here changes what happens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from baton.decode_worker.step_plan import StepOutcome, StepPlan
from baton.decode_worker.worker import DecodeWorker
from baton.engine.scheduling.batch import StepResult
from baton.simulation.fleet.hash_engine import RECORD_BYTES, WIDE_BYTES, narrowed, record
from baton.simulation.fleet.world import WorkerProcess

LONGEST_TEXT = 256  # tokens of a lab's prompt and output, and more


def watch_blocks(process: WorkerProcess, worker: DecodeWorker, breaches: list[str]) -> None:
    """Look at the sequences of each step of a decode worker once it is committed."""
    if worker._scheduler._speculator is None:
        return  # its sequences may keep a block that they were given before a preemption
    scheduler, commit, size = worker._scheduler, worker._scheduler.commit, process.pool.block_size

    def watched(plan: StepPlan, result: StepResult, steps: int = 1) -> StepOutcome:
        outcome = commit(plan, result, steps)
        for index, sequence in enumerate(plan.decoding):
            if index in result.broken or index in result.failed:
                continue  # it ends with the outcome, and its blocks with it
            needed = -(-(sequence.computed + max(1, sequence.under_way)) // size)
            if len(sequence.blocks) > needed and not sequence.ended:
                breaches.append(
                    f"{process.machine.name}: {sequence.computed} tokens of a sequence hold "
                    f"{len(sequence.blocks)} blocks, {needed} are needed"
                )
        return outcome

    scheduler.commit = watched  # type: ignore[method-assign]  # wraps this instance alone


def wrong_contents(process: WorkerProcess, slabs: int) -> Iterable[str]:
    """Name the cached blocks of a hash engine's pool that hold other tokens than published."""
    pool, size = process.pool, process.pool.block_size
    for block in pool._by_identity.values():
        tokens = array("I", pool._blocks[block].tokens)
        held = np.ascontiguousarray(process.array[block])
        if held.size == slabs * size * WIDE_BYTES:
            held = narrowed(held)
        held = held.reshape(slabs, size, RECORD_BYTES)
        if not any(_holds(held, tokens, start) for start in range(0, LONGEST_TEXT, size)):
            yield f"{process.machine.name}: block {block} is published for tokens it does not hold"


def _holds(held: NDArray[np.uint8], tokens: array[int], start: int) -> bool:
    """Return whether all slabs, those of a draft model too, hold the tokens from `start` on."""
    return all(
        slab.tobytes() == b"".join([record(token, at, n) for at, token in enumerate(tokens, start)])
        for n, slab in enumerate(held)
    )
