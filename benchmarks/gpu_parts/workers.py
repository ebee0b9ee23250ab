"""A part of `benchmarks.gpu`: a prefill and a decode worker as real processes that share one GPU,
another decode worker there that speculates, and another pair whose prefill worker computes on the
CPU, each against one process.

Greedy, seeded and constrained answers must be the same, and every request must have gone by a
handoff: a decode worker that prefilled for itself would give the same tokens and prove nothing. At
the end each worker's audit must show every block free or cached, and no handoff open.
"""

from __future__ import annotations

from baton.runtime import tls_version  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import http.client
import json
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from baton.deploy.host.packages import check_worker_packages, missing_packages
from benchmarks.figures.report import Figure
from benchmarks.gpu_parts.one_process import Ask, one_process_answers
from benchmarks.gpu_parts.small_model import END, text_of, write_small_model
from benchmarks.gpu_parts.speed import Given, Skipped

if TYPE_CHECKING:
    from baton.proto import worker_pb2
    from baton.runtime.registry import WorkerRecord
    from benchmarks.fleets.worker_pair import Answer, WorkerPair

LENGTHS = (300, 41, 16, 129, 64, 230)  # of prompts: partial last blocks, whole ones, two chunks
OUTPUT_TOKENS = 24
LOOP_TOKENS = 96  # of an answer that repeats itself, so that n-grams find proposals
SCHEMA = {  # bounded: an answer ends within SCHEMA_TOKENS characters
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 999},
        "b": {"enum": ["x", "yes"]},
        "c": {"type": "boolean"},
    },
    "required": ["a", "b", "c"],
}
SCHEMA_TOKENS = 40
VOCABULARY = 199  # of the small model
AUDIT_S = 20.0  # for the last leases to end
_COMPLETED = re.compile(r'^baton_handoffs_total\{outcome="completed"\} (\S+)', re.MULTILINE)
_BUSY = ("used", "leased", "pinned", "quarantined")  # states of blocks


@dataclass(frozen=True, slots=True)
class Found:
    """The answers of a decode worker and how many handoffs it completed."""

    answers: list[list[int]]
    handoffs: int
    accepted: int = 0  # proposals
    rejected: int = 0


def workers(given: Given) -> Iterator[Figure]:
    """Whether the tokens of all decode workers are those of one process. Raises RuntimeError if
    not, or if a worker has kept a block."""
    check_packages()
    from benchmarks.fleets.worker_pair import WorkerPair

    gpu = "cpu" if given.dry else "cuda:0"
    asks = asked(dry=given.dry)
    os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    with TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_small_model(model, qk_norm=True)
        pool = "pool.blocks=256" if given.dry else "pool.memory_fraction=0.02"
        settings = [pool, "router.placement=disaggregated"]
        on_gpu = [f"worker.device={gpu}"]
        pairs: list[WorkerPair] = []
        try:
            by_role = {"prefill": on_gpu, "decode": on_gpu}
            speculating = [*on_gpu, "worker.speculate=ngram"]
            pairs.append(WorkerPair(model, settings, by_role, more=[speculating]))
            if _cpu_pair(given):
                by_role = {"prefill": ["worker.device=cpu"], "decode": on_gpu}
                pairs.append(WorkerPair(model, settings, by_role))
            wanted = asyncio.run(one_process_answers(model, gpu, asks))
            check_schema(asks, wanted)
            yield pair_figure("shared_device", pairs[0], "decode-0", asks, wanted)
            yield pair_figure("speculating", pairs[0], "decode-1", asks, wanted)
            for pair in pairs[1:]:
                yield pair_figure("cpu_to_gpu", pair, "decode-0", asks, wanted)
            yield audited_figure(pairs)
        finally:
            for pair in pairs:
                pair.close()


def asked(*, dry: bool = False) -> list[Ask]:
    """Greedy requests, one with a long answer, then seeded ones, then such with a grammar."""
    chooser = random.Random(11)
    lengths = LENGTHS[:3] if dry else LENGTHS
    prompts = [[chooser.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    asks = [Ask(prompt, OUTPUT_TOKENS) for prompt in prompts]
    asks.append(Ask([5, 9, 100, 7] * 6, LOOP_TOKENS))
    asks += [Ask(prompt, OUTPUT_TOKENS, 1.0, seed) for seed, prompt in enumerate(prompts[:3], 5)]
    asks.append(Ask(prompts[1], SCHEMA_TOKENS, schema=SCHEMA))
    asks += [Ask(prompt, SCHEMA_TOKENS, 1.0, 9, SCHEMA) for prompt in prompts[:2]]
    return asks


def check_packages() -> None:
    """Raises Skipped where a worker would not start here."""
    try:
        check_worker_packages("cuda")  # among them NIXL, which no import here asks for
        import baton.deploy.processes.worker_process  # noqa: F401
        import benchmarks.fleets.worker_pair  # noqa: F401
    except Exception as error:  # grpcio and protobuf, if too old, raise errors of their own
        raise Skipped(f"workers need more, or newer, packages: {error}") from error


def _cpu_pair(given: Given) -> bool:
    missing = missing_packages("cpu")
    if missing:
        print(f"skipped: a prefill worker on the CPU: {', '.join(missing)} not installed")
    return not given.dry and not missing


def check_schema(asks: Sequence[Ask], answers: Sequence[list[int]]) -> None:
    """Check the reference itself: each constrained answer is an object of `SCHEMA`."""
    for ask, answer in zip(asks, answers, strict=True):
        if ask.schema is not None:
            found = json.loads(text_of(answer))
            if answer[-1] != END or sorted(found) != ["a", "b", "c"] or not 0 <= found["a"] < 1000:
                raise RuntimeError(f"an answer does not follow its schema: {text_of(answer)}")


def pair_figure(
    name: str, pair: WorkerPair, worker: str, asks: Sequence[Ask], wanted: list[list[int]]
) -> Figure:
    """Ask `worker` and count the answers that equal `wanted`. Raises RuntimeError unless all do,
    each by a handoff."""
    found = asyncio.run(_asked(pair, worker, asks))
    equal = sum(one == other for one, other in zip(found.answers, wanted, strict=True))
    if equal < len(wanted) or found.handoffs < len(wanted):
        raise RuntimeError(
            f"{name}: {equal} of {len(wanted)} answers equal one process's, {found.handoffs} came "
            "by a handoff"
        )
    beside = f"of {len(wanted)}, each by a handoff"
    if name == "speculating":
        if not found.accepted:
            raise RuntimeError(f"{name}: no proposal accepted, {found.rejected} rejected")
        beside += f"; {found.accepted} of {found.accepted + found.rejected} proposals accepted"
    return Figure(f"answers_equal_{name}", float(equal), "", beside, True)


async def _asked(pair: WorkerPair, worker: str, asks: Sequence[Ask]) -> Found:
    """The answers of a decode worker of the pair."""
    from benchmarks.fleets.worker_pair import RouterLink

    records = await asyncio.to_thread(pair.wait_ready)
    records["decode"] = pair.record(worker)
    link = RouterLink(records, pair.token, pair.tls)
    hello = await link.open()
    answers: list[Answer] = []
    try:
        for ask in asks:
            sampling = _sampling(ask, hello.vocabulary)
            stops = () if ask.schema is None else (END,)
            answers.append(
                await link.ask(ask.prompt, ask.tokens, local=False, sampling=sampling, stops=stops)
            )
    finally:
        await link.close()
    handoffs = await asyncio.to_thread(completed_handoffs, records["decode"].admin_address)
    return Found(
        [answer.tokens for answer in answers],
        handoffs,
        sum(answer.accepted_proposals for answer in answers),
        sum(answer.rejected_proposals for answer in answers),
    )


def _sampling(ask: Ask, vocabulary: bytes) -> worker_pb2.Sampling:
    from baton.proto import worker_pb2
    from baton.runtime.grammar.grammar_text import json_schema_grammar

    made = worker_pb2.Sampling(
        temperature=ask.temperature, top_p=1.0, repetition_penalty=1.0, seed=ask.seed
    )
    if ask.schema is not None:
        grammar = worker_pb2.Grammar(text=json_schema_grammar(ask.schema), vocabulary=vocabulary)
        made.grammar.CopyFrom(grammar)
    return made


def completed_handoffs(address: str) -> int:
    """Return the count of completed handoffs in the metrics of a decode worker."""
    found = _COMPLETED.search(_get(address, "/metrics"))
    if found is None:
        raise RuntimeError("the decode worker's metrics tell nothing of handoffs")
    return int(float(found[1]))


def audited_figure(pairs: Sequence[WorkerPair]) -> Figure:
    """Read each worker's audit, which adds up its pool. Raises RuntimeError if a block is held, or
    a handoff open, AUDIT_S after the last answer."""
    records = [record for pair in pairs for record in pair.records()]
    deadline = time.monotonic() + AUDIT_S
    while left := {record.worker_id: held for record in records if (held := _held(record))}:
        if time.monotonic() > deadline:
            raise RuntimeError(f"after their last answers workers still hold: {left}")
        time.sleep(0.2)  # a worker's audit can only be asked for again
    return Figure("workers_without_leaks", float(len(records)), "", f"of {len(records)}", True)


def _held(record: WorkerRecord) -> dict[str, Any]:
    """Return the counts in use that a worker's audit shows."""
    audit = json.loads(_get(record.admin_address, "/audit"))
    counts = {state: audit["blocks"][state] for state in _BUSY}
    counts |= {name: audit.get(name, 0) for name in ("requests", "waiting", "running", "reading")}
    counts["open_handoffs"] = audit["open_handoffs"]
    return {name: count for name, count in counts.items() if count}


def _get(address: str, path: str) -> str:
    connection = http.client.HTTPConnection(address, timeout=10.0)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"http://{address}{path} answered {answer.status}: {text[:300]}")
    return text
