"""A part of `benchmarks.gpu`: a prefill and a decode worker as real processes that share one GPU,
and another pair whose prefill worker computes on the CPU, against one process.

Greedy tokens must be the same, and every request must have gone by a handoff: a decode worker
that prefilled for itself would give the same tokens and prove nothing.
"""

from __future__ import annotations

from baton.engine.execution.engine_options import EngineOptions
from baton.runtime import tls_version  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import http.client
import os
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from baton.deploy.host.packages import check_worker_packages
from baton.engine.execution.loading import build_engine
from baton.engine.scheduling.batch import Draw, SamplingParams, Slice, StepBatch
from benchmarks.figures.report import Figure
from benchmarks.gpu_parts.small_model import write_small_model
from benchmarks.gpu_parts.speed import Given, Skipped

if TYPE_CHECKING:
    from benchmarks.fleets.worker_pair import WorkerPair

LENGTHS = (300, 41, 16, 129, 64, 230)  # of prompts: partial last blocks, whole ones, two chunks
OUTPUT_TOKENS = 24
VOCABULARY = 199  # of the small model
BLOCK_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0)
_COMPLETED = re.compile(r'^baton_handoffs_total\{outcome="completed"\} (\S+)', re.MULTILINE)


def workers(given: Given) -> Iterator[Figure]:
    """Whether both pairs' tokens are those of one process. Raises RuntimeError if not."""
    check_packages()
    from benchmarks.fleets.worker_pair import WorkerPair

    gpu = "cpu" if given.dry else "cuda:0"
    roles = {"shared_device": (gpu, gpu)} | ({} if given.dry else {"cpu_to_gpu": ("cpu", gpu)})
    chooser = random.Random(11)
    lengths = LENGTHS[:3] if given.dry else LENGTHS
    prompts = [[chooser.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    with TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_small_model(model, qk_norm=True)
        pool = "pool.blocks=256" if given.dry else "pool.memory_fraction=0.02"
        pairs = {
            name: WorkerPair(
                model,
                [pool, "router.placement=disaggregated"],
                {
                    "prefill": [f"worker.device={prefill}"],
                    "decode": [f"worker.device={decode}"],
                },
            )
            for name, (prefill, decode) in roles.items()
        }
        try:
            wanted = asyncio.run(_alone(model, gpu, prompts))
            for name, pair in pairs.items():
                yield _figure(name, pair, prompts, wanted)
        finally:
            for pair in pairs.values():
                pair.close()


def check_packages() -> None:
    """Raises Skipped where a worker would not start here."""
    try:
        check_worker_packages("cuda")  # among them NIXL, which no import here asks for
        import baton.deploy.processes.worker_process  # noqa: F401
        import benchmarks.fleets.worker_pair  # noqa: F401
    except Exception as error:  # grpcio and protobuf, if too old, raise errors of their own
        raise Skipped(f"workers need more, or newer, packages: {error}") from error


def _figure(
    name: str, pair: WorkerPair, prompts: list[list[int]], wanted: list[list[int]]
) -> Figure:
    found, handoffs = asyncio.run(_asked(pair, prompts))
    equal = sum(one == other for one, other in zip(found, wanted, strict=True))
    if equal < len(wanted) or handoffs < len(wanted):
        raise RuntimeError(
            f"{name}: {equal} of {len(wanted)} answers equal one process's, {handoffs} came by a "
            "handoff"
        )
    beside = f"of {len(wanted)}, each by a handoff"
    return Figure(f"answers_equal_{name}", float(equal), "", beside, True)


async def _asked(pair: WorkerPair, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """The pair's answers, and how many handoffs its decode worker completed."""
    from benchmarks.fleets.worker_pair import RouterLink

    records = await asyncio.to_thread(pair.wait_ready)
    link = RouterLink(records, pair.token, pair.tls)
    await link.open()
    try:
        answers = [await link.ask(prompt, OUTPUT_TOKENS, local=False) for prompt in prompts]
    finally:
        await link.close()
    handoffs = await asyncio.to_thread(_completed, records["decode"].admin_address)
    return [answer.tokens for answer in answers], handoffs


def _completed(address: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=10.0)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    found = _COMPLETED.search(text)
    if found is None:
        raise RuntimeError("the decode worker's metrics tell nothing of handoffs")
    return int(float(found[1]))


async def _alone(model: Path, device: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The answers of one process, one after another."""
    engine = build_engine(model, EngineOptions(blocks=64, block_size=BLOCK_TOKENS, device=device))
    answers = []
    try:
        for prompt in prompts:
            table = range(-(-(len(prompt) + OUTPUT_TOKENS) // BLOCK_TOKENS))
            tokens: list[int] = []
            given, start = list(prompt), 0
            for _ in range(OUTPUT_TOKENS):
                draw = Draw(0, start + len(given), GREEDY)
                step = StepBatch((Slice(given, start, table, (draw,)),))
                result = await engine.submit(step).result()
                start += len(given)
                given = [result.drawn[0][0].token]
                tokens += given
            answers.append(tokens)
    finally:
        await engine.close()
    return answers
