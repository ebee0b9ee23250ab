"""Measure the gain of planning the next step while one runs: a decode worker with and without.

    python -m benchmarks.steps_ahead [--batches N ...] [--rounds N] [--tokens N] [--arrivals N]
                                     [--threads N] [--quick] [--json FILE]

One process: the real decode worker on the real engine, a random Qwen3-shaped bf16 model of
0.45 B parameters, prompts of 16 tokens that it computes itself. Every round runs each batch once
in three ways, in turns: one step at a time, the next step planned shortly before the running one
should end (as the workers do), and planned at once. Figures are medians over rounds, of the time
in which all sequences decode.

tokens_per_s_N   output tokens a second at batch N
itl_ms_N         median time between two tokens of a sequence; itl_p99_ms_N its 99th percentile
arrival_ms_N     a request of 4 tokens arrives while N decode: until its first token
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from baton.decode_worker.sequences import RequestUpdate
from baton.decode_worker.worker import DecodeWorker
from baton.deploy.serve.plan import SHORT_SPIN
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_engine
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.scheduling import step_pipeline
from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import MemoryExchange, MemoryMover
from baton.models.embedded import embedded_model
from baton.proto import worker_pb2
from baton.runtime.config import Config, PoolConfig, StepConfig
from baton.runtime.wire import ModelLimits
from benchmarks.figures.report import Figure, parser, report
from benchmarks.fleets.no_peers import NoPeers
from benchmarks.inputs.cached_model import cached_model

BATCHES = (1, 8, 32)
PROMPT_TOKENS = 16
ARRIVAL_TOKENS = 4
ARRIVALS = 4
SETTLED = 4  # tokens of the youngest, after which all decode
BLOCK_TOKENS = 16
ROUNDS = 5
TOKENS = 40
SPIN = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": SHORT_SPIN}
# how long before a step's expected end the next is planned; after its end, for one step at a time
LEADS_S = {"one": -3600.0, "ahead": step_pipeline.LEAD_S, "at_once": 3600.0}
WAYS = tuple(LEADS_S)

_ids = itertools.count(1)


class Asked:
    """One request, and when its tokens came."""

    def __init__(self, worker: DecodeWorker, prompt: list[int], tokens: int) -> None:
        self.times: list[float] = []
        self.decodes = asyncio.Event()
        self.ended = asyncio.Event()
        self.asked = time.perf_counter()
        self.name = f"request-{next(_ids)}"
        submit = worker_pb2.Submit(
            request_id=self.name,
            attempt=1,
            prompt=prompt,
            choices=[worker_pb2.Choice(choice=0)],
            sampling=worker_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
            max_tokens=tokens,
            placement=worker_pb2.Placement(local=True),
        )
        worker.submit(submit, self._emit)

    def _emit(self, output: RequestUpdate) -> None:
        assert isinstance(output, worker_pb2.Output)  # it asks no prefill worker
        if output.HasField("token"):
            self.times.append(time.perf_counter())
        if len(self.times) == SETTLED:
            self.decodes.set()
        if output.end:
            if output.failure.code:
                raise RuntimeError(output.failure.detail)
            self.ended.set()


@asynccontextmanager
async def working(engine: TorchEngine, way: str) -> AsyncIterator[DecodeWorker]:
    """A decode worker on `engine`, with an empty pool."""
    blocks = engine.pool.blocks
    view = HostPool(engine.pool.bytes_view(), engine.pool.slabs)
    worker = DecodeWorker(
        worker_id="decode-0",
        boot_id=b"b" * 16,
        engine=engine,
        pool=BlockPool(blocks, BLOCK_TOKENS),
        mover=MemoryMover(view, b"b" * 16, MemoryExchange()),
        peers=NoPeers(),
        limits=ModelLimits(
            engine.spec.vocab_size, engine.max_context, "benchmark", engine.dtype_name, b"key"
        ),
        config=Config(
            pool=PoolConfig(block_size=BLOCK_TOKENS),
            step=StepConfig(local_prefill_tokens=PROMPT_TOKENS * max(BATCHES), waiting_share=1.0),
        ),
        wall_offset_s=0.0,
        new_id=lambda: os.urandom(16),
    )
    lead_s, step_pipeline.LEAD_S = step_pipeline.LEAD_S, LEADS_S[way]
    loop = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        step_pipeline.LEAD_S = lead_s
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop


async def decode(engine: TorchEngine, way: str, batch: int, tokens: int) -> dict[str, float]:
    """The figures of one run."""
    async with working(engine, way) as worker:
        asked = [
            Asked(worker, [(n * 31 + index) % 997 for index in range(PROMPT_TOKENS)], tokens)
            for n in range(batch)
        ]
        for request in asked:
            await request.ended.wait()
    begin = max(request.times[0] for request in asked)
    end = min(request.times[-1] for request in asked)
    times = [[t for t in request.times if begin <= t <= end] for request in asked]
    gaps = [b - a for mine in times for a, b in itertools.pairwise(mine)]
    return {
        "tokens_per_s": sum(len(mine) - 1 for mine in times) / (end - begin),
        "itl_ms": 1000 * statistics.median(gaps),
        "itl_p99_ms": 1000 * statistics.quantiles(gaps, n=100)[98],
    }


async def arrive(engine: TorchEngine, way: str, batch: int, arrivals: int) -> float:
    """Milliseconds to the first token of a request that arrives while `batch` sequences decode."""
    async with working(engine, way) as worker:
        crowd = [Asked(worker, [n, *range(PROMPT_TOKENS)], 1000) for n in range(batch)]
        await crowd[-1].decodes.wait()
        found = []
        for number in range(arrivals):
            step_s = (crowd[0].times[-1] - crowd[0].times[-3]) / 2
            await asyncio.sleep(step_s * (2 + (number + 0.5) / arrivals))  # all over a step
            late = Asked(worker, [900 + number] * ARRIVAL_TOKENS, 1)
            await late.ended.wait()
            found.append(late.times[0] - late.asked)
        for request in crowd:
            worker.cancel(request.name, 1)
    return 1000 * statistics.fmean(found)


async def run(engine: TorchEngine, options: argparse.Namespace) -> dict[str, list[float]]:
    """Figures by `name_batch_way`, one entry a round."""
    found: dict[str, list[float]] = defaultdict(list)
    await decode(engine, "one", max(options.batches), 4)  # what is compiled at the first need
    for number in range(options.rounds):
        for batch in options.batches:
            for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                for name, value in (await decode(engine, way, batch, options.tokens)).items():
                    found[f"{name}_{batch}_{way}"].append(value)
                if options.arrivals:
                    value = await arrive(engine, way, batch, options.arrivals)
                    found[f"arrival_ms_{batch}_{way}"].append(value)
    await engine.close()
    return found


def figures(found: dict[str, list[float]]) -> list[Figure]:
    """Each beside one step at a time, as the median of the rounds' ratios."""
    made = []
    for name, values in found.items():
        stem = name.removesuffix("_one").removesuffix("_ahead").removesuffix("_at_once")
        pairs = zip(values, found[f"{stem}_one"], strict=True)
        ratio = statistics.median(value / one for value, one in pairs)
        unit = "ms" if "_ms" in name else "/s"
        beside = "" if name.endswith("_one") else f"{ratio:.3f} of one step at a time"
        made.append(Figure(name, statistics.median(values), unit, beside))
    return sorted(made, key=lambda figure: figure.name)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if arguments is None and any(os.environ.get(name) != SPIN[name] for name in SPIN):
        module = ["-m", "benchmarks.steps_ahead"]
        os.execve(sys.executable, [sys.executable, *module, *sys.argv[1:]], os.environ | SPIN)
    engine = build_engine(
        embedded_model() if options.quick else cached_model(),
        EngineOptions(
            blocks=640, block_size=BLOCK_TOKENS, dtype="bfloat16", threads=options.threads
        ),
    )
    report(figures(asyncio.run(run(engine, options))), options.json)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("A step planned while another runs, against one step at a time")
    made.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    made.add_argument("--arrivals", type=int, default=ARRIVALS, help="a round; 0: not measured")
    made.add_argument("--rounds", type=int, default=ROUNDS)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--tokens", type=int, default=TOKENS, help="of each sequence")
    made.add_argument("--quick", action="store_true", help="the small embedded model instead")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
