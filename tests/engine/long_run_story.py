"""What a few thousand steps leave allocated in a process that does nothing else.

    python -P tests/engine/long_run_story.py FOLDER NAME STEPS

FOLDER holds a model; NAME is one of STORIES. Prints by how many bytes the process has grown.
"""

import gc
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import torch

from baton.engine.execution.cuda_runner import CudaRunner
from baton.engine.execution.decode_graph import DecodeGraphs, DrawKernels
from baton.engine.execution.decoder_kernels import DecoderKernels
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.graph_device import HostDevice
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.attention import TorchAttention
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.runtime import process_memory
from baton.runtime.sampling import SamplingParams

sys.path.append(str(Path(__file__).parents[2]))
from tests.support.decoder_probe import parts_of

WARM_UP = 100
STRETCHES = 4
BATCH = 64
BLOCK, TABLE = 8, 6  # tokens in a block, blocks of a sequence
GREEDY = SamplingParams(temperature=0.0)
PYTHON_BLOCK = 512  # bytes: the largest that Python's own allocator hands out


def own_bytes():
    """What is allocated and not freed. Pages in memory would not do: a leak may fill holes of the
    heap, and a hole's first touch looks like a leak."""
    return process_memory.allocated_bytes() + PYTHON_BLOCK * sys.getallocatedblocks()


def growth(run, steps):
    """Of so many steps, by the stretch that grew least: a leak is in all of them, a table that is
    doubled once is in one."""
    run(range(WARM_UP))
    starts = [WARM_UP + steps * part // STRETCHES for part in range(STRETCHES + 1)]
    grown = []
    for start, end in itertools.pairwise(starts):
        gc.collect()
        before = own_bytes()
        run(range(start, end))
        gc.collect()
        grown.append(own_bytes() - before)
    return STRETCHES * min(grown)


def leak(folder):
    """Each step leaves 64 KiB behind, which no check may overlook."""
    left = []
    return lambda numbers: left.extend(bytes([1]) * 65536 for _ in numbers)


def step(number):
    """64 sequences of every length, each a token further than in the step before; four draw by
    seed, the others greedily, and one computes a prompt in a chunk."""
    slices = []
    for sequence in range(BATCH):
        start = (number + 3 * sequence) % (BLOCK * TABLE - 12)
        tokens = [(number * 7 + sequence) % 199]
        if number % BATCH == sequence:
            tokens *= 2 + sequence % 8
        seeded = sequence % 16 == 0
        params = SamplingParams(temperature=float(seeded), seed=sequence, top_p=0.9)
        blocks = range(sequence * TABLE, (sequence + 1) * TABLE)
        slices.append(Slice(tokens, start, blocks, (Draw(0, start + len(tokens), params),)))
    return StepBatch(tuple(slices))


def steps(folder, deterministic):
    runner = build_runner(
        folder, EngineOptions(blocks=BATCH * TABLE, block_size=BLOCK, deterministic=deterministic)
    )
    runner.pool.tensor.zero_()

    def run(numbers):
        for number in numbers:
            assert not runner.run(step(number)).broken

    return run


def ahead(runner, numbers):
    """Steps that are started before the one before them is read, as the engine's threads do; each
    row feeds itself, but every fiftieth step computes a chunk, and so goes without a graph."""
    before = None
    for number in numbers:
        batch = step(number)
        if number % 50:
            slices = [
                replace(item, tokens=(0,), feed=row, draws=(Draw(0, item.start + 1, GREEDY),))
                for row, item in enumerate(batch.slices)
            ]
            batch = StepBatch(tuple(slices))
        after = runner.start(batch)
        if before is not None:
            assert not before.result().broken
        before = after
    before.result()


def greedy(logits, rules, tokens, finite, masks):
    tokens.copy_(logits.argmax(dim=-1))
    finite.fill_(1)


def nothing(*_):
    """Stands for kernels of rows that ask for nothing."""


def gpu(folder):
    """A GPU's runner over a device that captures nothing: stagings, tables, steps under way."""
    plain = build_runner(folder, EngineOptions(blocks=1, block_size=BLOCK, backend="torch"))
    pool = KvPool(plain.spec, BATCH * TABLE, BLOCK, torch.float32, torch.device("cpu"))
    pool.tensor.zero_()
    attention = TorchAttention(pool, plain.spec.attention)
    decoder = DecoderKernels(attention).decoder(plain.spec, parts_of(plain.decoder).weights)
    eager = ModelRunner(plain.spec, pool, decoder)
    kernels = DrawKernels(nothing, greedy, nothing)
    rows = {"max_rows": BATCH, "table_width": TABLE, "vocab_size": plain.spec.vocab_size}
    graphs = DecodeGraphs(decoder, HostDevice(), kernels, spare_block=pool.spare_block, **rows)
    graphs.capture((BATCH,))
    runner = CudaRunner(eager, graphs)
    return lambda numbers: ahead(runner, numbers)


STORIES = {
    "leak": leak,
    "plain": lambda folder: steps(folder, deterministic=False),
    "deterministic": lambda folder: steps(folder, deterministic=True),
    "gpu": gpu,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, name, count = sys.argv[1:]
    print(growth(STORIES[name](Path(folder)), int(count)))
