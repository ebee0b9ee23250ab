"""Greedy and seeded tokens of a small model over ranks on devices of their own, and on the CPU.

    TRITON_INTERPRET=1 python -P tests/engine/device_ranks_story.py FOLDER --device cpu
    python -P tests/engine/device_ranks_story.py FOLDER --device cuda --ranks 2

FOLDER holds a model. On a CPU the ranks run Triton's interpreter and gloo. Prints one JSON list:
whether each sequence is equal, whether the copy of a block is, whether handoffs to and from one
process are, and whether a rank that stands still, and the end of one, were noticed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path

from baton.deploy.processes.pool_memory import local_pool
from baton.engine.device_ranks.device_loading import build_device_rank_runner, watch
from baton.engine.device_ranks.leading import DeviceRankRunner, LeadingPool
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.kv_transfer.nixl_mover import NixlMover
from baton.runtime.errors import DeviceLost
from baton.runtime.sampling import SamplingParams

sys.path.append(str(Path(__file__).parent))
from device_story import BLOCKS, SIZE, Counted, tokens, torch_runner
from interpreter import patch_once_a_launch, shorten_proof

NOTICED_S = 3.0
BUSY_S = 30.0  # on a machine whose other work may delay each look at the ranks
READ_S = 30.0
GRANTER = b"the granter's id"
GREEDY = SamplingParams(temperature=0.0)
Runner = ModelRunner | DeviceRankRunner


def copies_whole_blocks(runner: DeviceRankRunner) -> bool:
    """Copy a block, and return whether the parts of all ranks are equal and were not before."""
    pool = runner.pool
    assert isinstance(pool, LeadingPool)
    blocks = [each.bytes_tensor() for each in pool.parts]
    source, target = 0, BLOCKS - 1
    for part in blocks:
        part[source].random_(1, 255)
        part[target].zero_()
    pool.copy_block(source, target)
    runner.run(StepBatch((Slice([1], 0, [1], ()),)))  # every rank has carried out what was before
    return all(bool((part[source] == part[target]).all()) for part in blocks)


async def hands_over(granter: Runner, reader: Runner) -> bool:
    """Compute a prompt with one runner, READ its blocks into the other's pool by NIXL, and return
    whether checksums and the next tokens of both are equal."""
    theirs, ours, length = [40, 41], [52, 50], 20
    prompt = [(7 * index + 3) % granter.spec.vocab_size for index in range(length)]
    first = Draw(0, length, GREEDY)
    result = granter.run(StepBatch((Slice(prompt, 0, theirs, (first,)),)))
    token = result.drawn[0][0].token
    movers = [
        NixlMover(local_pool(each.pool, each.spec.kv_heads), boot)
        for each, boot in ((granter, GRANTER), (reader, b"a reader's id 16"))
    ]
    try:
        movers[0].hold_progress()
        await movers[1].connect(movers[0].describe())
        read = movers[1].read(GRANTER, theirs, ours, [5, 6])
        async with asyncio.timeout(READ_S):
            await read.landed
        assert read.checksums is not None
        offered, slabs = await movers[0].checksums(theirs, [5, 6]), movers[1].shape(GRANTER).slabs
        wanted = offered[:, list(slabs)] if slabs else offered
        equal = bool((await read.checksums == wanted).all())
    finally:
        for mover in movers:
            await mover.close()
    next_draw = Draw(0, length + 1, GREEDY)
    tokens = [
        each.run(StepBatch((Slice([token], length, blocks, (next_draw,)),))).drawn[0][0].token
        for each, blocks in ((granter, theirs), (reader, ours))
    ]
    return equal and tokens[0] == tokens[1]


class LossWatch:
    """Collects in `reasons` why the watch over a runner takes its ranks for lost."""

    def __init__(self, runner: DeviceRankRunner) -> None:
        self.reasons: list[str] = []
        self._noticed = threading.Event()
        watch(runner.group, self._lost)

    def _lost(self, reason: str) -> None:
        self.reasons.append(reason)
        self._noticed.set()

    def wait(self, within_s: float) -> None:
        self._noticed.wait(within_s)


def notices_a_rank_that_stands_still(runner: DeviceRankRunner, within_s: float) -> bool:
    """Stop the last rank for a while, and return whether the watch names it in time."""
    watched = LossWatch(runner)
    rank = len(runner.group.process_ids)
    os.kill(runner.group.process_ids[-1], signal.SIGSTOP)
    runner.pool.copy_block(0, 1)
    watched.wait(within_s)
    os.kill(runner.group.process_ids[-1], signal.SIGCONT)
    return watched.reasons == [f"rank {rank} has read no command for 2 s"]


def notices_the_end_of_a_rank(runner: DeviceRankRunner) -> bool:
    """Kill the last rank, and return whether the watch says which one, and commands are refused."""
    watched = LossWatch(runner)
    ranks = len(runner.group.process_ids) + 1
    os.kill(runner.group.process_ids[-1], signal.SIGKILL)
    watched.wait(NOTICED_S)
    try:
        for _ in range(3):  # more commands than can wait for a rank
            runner.pool.copy_block(0, 1)
    except DeviceLost:
        return watched.reasons == [f"rank {ranks - 1} of {ranks} ended with code -9"]
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--sized", action="store_true", help="the pool by measured memory")
    parser.add_argument("--deterministic", action="store_true")
    given = parser.parse_args()
    patch_once_a_launch()
    on_cpu = given.device == "cpu"
    if on_cpu:
        shorten_proof(SIZE)
    options = EngineOptions(
        blocks=0 if given.sized else BLOCKS,
        block_size=SIZE,
        dtype="float32",
        memory_fraction=0.01,
        step_tokens=4,
        device=given.device if on_cpu else "cuda:0",
        max_context=128,
        max_rows=8,
        kv_dtype=given.kv_dtype,
        deterministic=given.deterministic,
    )
    ours = build_device_rank_runner(
        given.folder,
        given.ranks,
        options,
        ep=given.ep,
        memory=Counted() if on_cpu else None,
        buckets=(4,) if on_cpu else (1, 2, 8),
    )
    plain = torch_runner(given.folder, given.kv_dtype)
    lengths = [9, 20, 2] if on_cpu else [9, 30, 2, 77, 16]
    found = tokens(ours, lengths, given.steps, ours.spec.vocab_size)
    wanted = tokens(plain, lengths, given.steps, ours.spec.vocab_size)
    equal = [a == b for a, b in zip(found, wanted, strict=True)]
    assert bool(ours.numerics) == given.deterministic
    equal.append(copies_whole_blocks(ours))
    equal.append(asyncio.run(hands_over(ours, plain)) and asyncio.run(hands_over(plain, ours)))
    equal.append(notices_a_rank_that_stands_still(ours, BUSY_S if on_cpu else NOTICED_S))
    equal.append(notices_the_end_of_a_rank(ours))
    print(json.dumps(equal))
    ours.close()
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
