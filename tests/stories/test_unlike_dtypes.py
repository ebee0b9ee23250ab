"""Prefill and decode workers that store KV in different dtypes: the granter converts, and the
answer is that of a worker that holds the same KV in its own dtype."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import Counter, Gauge

from baton.decode_worker.scheduler import DecodeScheduler
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.engine.scheduling.blocks import Hold
from baton.kv_transfer.conversion import HostConversion
from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.models.embedded import embedded_model
from baton.prefill_worker.scheduler import PrefillScheduler
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import handoff_metrics, metrics
from baton.runtime.sampling import SamplingParams
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.model_cluster import ModelCluster
from tests.support.engine_probe import runner_of
from tests.support.grant_admission import admit
from tests.support.machine_speed import slowness
from tests.support.metric_values import metric_value

BLOCK = 8
CHOOSER = random.Random(4)
PROMPT = [CHOOSER.randrange(200) for _ in range(61)]
BLOCKS = -(-len(PROMPT) // BLOCK)
OUTPUT = 12


class Pair:
    """A prefill worker and a decode worker; `offered` are the blocks that were converted."""

    def __init__(
        self, prefill: str, decode: str, blocks: int = 64, lease_s: float = 5.0, **step: int
    ) -> None:
        self.cluster = ModelCluster(
            embedded_model(),
            block_size=BLOCK,
            kv_dtype=prefill,
            deterministic=False,
            lease_s=lease_s,
            **step,
        )
        self.cluster.add_prefill("prefill-0", blocks)
        self.cluster.kv_dtype = decode
        self.cluster.add_decode("decode-0", 120)
        self.client = Client(self.cluster, "decode-0")
        self.offered: list[int] = []
        self.attempts: list[Attempt] = []
        self.fate = Fate()
        self.cluster.exchange.decide = self._decide

    def _decide(self, attempt: Attempt) -> Fate:
        self.attempts.append(attempt)
        return self.fate if len(self.attempts) == 1 else Fate()

    @property
    def engines(self) -> tuple[TorchEngine, TorchEngine]:
        prefill, decode = self.cluster.engines
        return prefill, decode

    def ask(self, prompt: list[int] = PROMPT, **fields: Any) -> Request:
        return self.client.submit(prompt, max_tokens=OUTPUT, **fields)

    def continued(self, first: int) -> list[int]:
        """Return the answer after a first token of the decode worker's engine over the prefill
        worker's KV, written row by row into its pool as a step would write it."""
        prefill, decode = self.engines
        pool = self.cluster.decode["decode-0"].pool
        blocks = pool.allocate(BLOCKS + 2, Hold.USED)
        table = torch.tensor(blocks)
        for layer in range(prefill.spec.layers):
            kept = prefill.pool.take(layer, torch.tensor(self.offered[:BLOCKS]))
            for position in range(len(PROMPT)):
                index, slot = divmod(position, BLOCK)
                row, own_slot = kept[index, :, :, slot][None], torch.tensor([slot])
                decode.pool.put(layer, table[index : index + 1], own_slot, row)
        answer, runner = [first], runner_of(decode)
        while len(answer) < OUTPUT:
            at = len(PROMPT) + len(answer) - 1
            draw = Draw(0, at + 1, SamplingParams(temperature=0.0, seed=1))
            step = StepBatch((Slice(answer[-1:], at, blocks, (draw,)),))
            ((drawn,),) = runner.run(step).drawn
            answer.append(drawn.token)
        pool.release(blocks, Hold.USED)
        return answer


@pytest.fixture
async def made(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Pair]]:
    pairs: list[Pair] = []
    convert = HostConversion.convert

    def noted(self: HostConversion, sources: Sequence[int], *more: Any) -> np.ndarray:
        pairs[0].offered.extend(sources)
        return convert(self, sources, *more)

    monkeypatch.setattr(HostConversion, "convert", noted)
    yield pairs
    for pair in pairs:
        await pair.cluster.close()


def start(made: list[Pair], *args: Any, **kwargs: Any) -> Pair:
    made.append(Pair(*args, **kwargs))
    return made[-1]


async def tokens(request: Request) -> list[int]:
    await request.finished(60 * slowness())
    assert request.end().end == worker_pb2.LENGTH, request.end()
    return request.tokens()


def counted(metric: Counter | Gauge) -> float:
    return metric_value(metric)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("auto", "int8"), ("auto", "fp8_e4m3"), ("int8", "auto"), ("fp8_e4m3", "auto")],
)
async def test_tokens_are_those_of_the_same_kv_stored_here(
    made: list[Pair], prefill: str, decode: str
) -> None:
    pair = start(made, prefill, decode)
    before = counted(handoff_metrics.CONVERTED_BLOCKS)
    request = pair.ask()
    answer = await tokens(request)
    assert answer == pair.continued(answer[0])
    assert counted(handoff_metrics.CONVERTED_BLOCKS) - before == BLOCKS
    each = 1 if prefill == "auto" else 2
    assert [len(a.remote) for a in pair.attempts] == [each * len(a.local) for a in pair.attempts]
    assert sum(len(attempt.local) for attempt in pair.attempts) == BLOCKS
    await pair.cluster.quiet()
    again = await tokens(pair.ask())  # from the cache, but for the partial block, or READ again
    assert again == answer
    assert request.outputs[0].cached_tokens == 0
    await pair.cluster.quiet()


@pytest.mark.parametrize("prefill", ["auto", "int8"])
async def test_a_corrupt_block_is_read_again(made: list[Pair], prefill: str) -> None:
    decode = "int8" if prefill == "auto" else "auto"
    expected = await tokens(start(made, prefill, decode).ask())
    pair = start(made, prefill, decode)
    pair.fate = Fate(corrupt=0, bit=12345)
    wrong = counted(handoff_metrics.CHECKSUM_FAILURES)
    assert await tokens(pair.ask()) == expected
    assert counted(handoff_metrics.CHECKSUM_FAILURES) - wrong == 1
    await pair.cluster.quiet()


@pytest.mark.parametrize("prefill", ["auto", "int8"])
async def test_without_room_to_convert_the_prompt_is_local(made: list[Pair], prefill: str) -> None:
    decode = "int8" if prefill == "auto" else "auto"
    pair = start(made, prefill, decode, blocks=2 * BLOCKS - 1)
    before = counted(handoff_metrics.CONVERTED_BLOCKS)
    assert len(await tokens(pair.ask())) == OUTPUT
    assert counted(handoff_metrics.CONVERTED_BLOCKS) == before and not pair.attempts
    await pair.cluster.quiet()


@pytest.mark.parametrize("prefill", ["auto", "int8"])
async def test_many_prompts_share_what_room_there_is(made: list[Pair], prefill: str) -> None:
    decode = "int8" if prefill == "auto" else "auto"
    pair = start(made, prefill, decode, blocks=3 * BLOCKS + 2, max_prompts=4)
    asked = [pair.ask([number, *PROMPT[1:]]) for number in range(4)]
    for request in asked:
        assert len(await tokens(request)) == OUTPUT
    assert sum(len(attempt.local) for attempt in pair.attempts) >= 4 * BLOCKS
    await pair.cluster.quiet()


@pytest.mark.parametrize("prefill", ["auto", "int8"])
async def test_a_later_turn_reads_the_answer_converted(made: list[Pair], prefill: str) -> None:
    decode = "int8" if prefill == "auto" else "auto"
    pair = start(made, prefill, decode)
    first = await tokens(pair.ask())
    prompt = [*PROMPT, *first, 7, 8, 9]
    held = (len(PROMPT) + OUTPUT - 1) // BLOCK
    await pair.cluster.quiet()
    source = pair.cluster.source("decode-0", held)
    source.kv_dtype = pair.engines[1].dtype_name
    cached_there = pair.cluster.decode["decode-0"].pool.counts().cached
    if prefill == "int8":  # what was in eight bits is not kept as plain KV, nor what grew from it
        assert cached_there == 0
        held = len(PROMPT) // BLOCK
    else:
        assert cached_there == held
    read, computed = (
        counted(handoff_metrics.CACHED_READ_BLOCKS),
        counted(metrics.TOKENS.labels("prompt")),
    )
    cached = pair.cluster.prefill["prefill-0"].pool.counts().cached
    assert len(await tokens(pair.ask(prompt, source=source))) == OUTPUT
    assert counted(handoff_metrics.CACHED_READ_BLOCKS) - read == held - len(PROMPT) // BLOCK
    assert counted(metrics.TOKENS.labels("prompt")) - computed == len(prompt) - held * BLOCK
    await pair.cluster.quiet()
    kept = pair.cluster.prefill["prefill-0"].pool.counts().cached - cached
    # KV of eight bits is not cached as plain KV, which serves readers of plain KV too.
    assert kept == (0 if prefill == "auto" else len(prompt) // BLOCK - len(PROMPT) // BLOCK)


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_nothing_is_converted_while_a_request_waits_for_blocks(
    made: list[Pair], monkeypatch: pytest.MonkeyPatch, role: str, waiting: int
) -> None:
    """Blocks of the cache that need no conversion are granted beside it."""
    pair = start(made, "auto", "int8")
    await tokens(pair.ask())
    await pair.cluster.quiet()
    nodes: Any = {"prefill": pair.cluster.prefill, "decode": pair.cluster.decode}[role]
    (node,) = nodes.values()
    plain, narrow = (engine.dtype_name for engine in pair.engines)
    own, other = (plain, narrow) if role == "prefill" else (narrow, plain)
    scheduler = PrefillScheduler if role == "prefill" else DecodeScheduler
    monkeypatch.setattr(scheduler, "waiting", property(lambda self: waiting))
    pinned = {}
    for kv_dtype in (own, other):
        opening = handoff_pb2.OpenHandoff(
            tokens=PROMPT[: 4 * BLOCK], cached_only=True, kv_dtype=kv_dtype
        )
        granted = admit(node.worker.grants, opening)
        pinned[kv_dtype] = node.pool.counts().pinned
        granted.end()
    each = 1 if role == "prefill" else 2
    assert pinned == {own: 4, other: 0 if waiting else 4 * (1 + each)}
    assert node.pool.counts().pinned == 0


@pytest.mark.parametrize("said", ["", "int8 of bfloat16"])
async def test_a_plain_reader_gets_no_kv_of_eight_bits(made: list[Pair], said: str) -> None:
    """A source whose KV is less precise than what the reader stores is not read, also where its
    placement did not say so."""
    pair = start(made, "auto", "int8", lease_s=1.5)  # its granter waits for it
    first = await tokens(pair.ask())
    pair.cluster.kv_dtype = "auto"
    pair.cluster.add_decode("decode-1", 120)
    plain = Client(pair.cluster, "decode-1")
    await pair.cluster.quiet()
    held = (len(PROMPT) + OUTPUT - 1) // BLOCK
    source = pair.cluster.source("decode-0", held)
    source.kv_dtype = said
    read = counted(handoff_metrics.CACHED_READ_BLOCKS)
    request = plain.submit([*PROMPT, *first, 7, 8, 9], max_tokens=OUTPUT, source=source)
    assert len(await tokens(request)) == OUTPUT
    assert counted(handoff_metrics.CACHED_READ_BLOCKS) == read
    await pair.cluster.quiet()
