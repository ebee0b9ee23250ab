"""A decode worker that speculates: the tokens are those of one that does not, in every case.
On virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from baton.engine.scheduling.batch import StepBatch
from baton.engine.speculation.ngram_proposer import NgramProposer
from baton.engine.speculation.proposer import Proposer
from baton.engine.speculation.suffix_proposer import SuffixProposer
from baton.proto import worker_pb2
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.cluster import Cluster
from baton.simulation.fleet.hash_engine import HashEngine
from baton.simulation.fleet.oracle_proposer import OracleProposer
from tests.support.virtual_time import on_virtual_time

MakeCluster = Callable[..., Cluster]

STEP_S = 0.004
PROMPT = [7 * index % 90 for index in range(21)]
RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "n": 3},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "temperature": 1.0, "n": 2},
    {"top_logprobs": 3},
]
Reported = list[tuple[list[int], int, list[tuple[float, list[tuple[int, float]]]]]]


def engine_of(cluster: Cluster) -> HashEngine:
    return cluster.decode["decode-0"].engine


def reported(request: Request) -> Reported:
    """What the client gets of each choice: tokens, the end, and logprobs."""
    found = []
    for choice in range(len(request.submit.choices)):
        mine = [o for o in request.outputs if o.choice == choice and o.HasField("token")]
        logprobs = [(o.logprob, [(top.token, top.logprob) for top in o.top]) for o in mine]
        found.append((request.tokens(choice), int(request.end(choice).end), logprobs))
    return found


def texts(*requests: Request) -> list[list[int]]:
    return [
        [*request.submit.prompt, *tokens]
        for request in requests
        for tokens, _, _ in reported(request)
    ]


def verified(cluster: Cluster) -> list[StepBatch]:
    """All steps with proposals, from now on."""
    submit, batches = engine_of(cluster).submit, list[StepBatch]()

    def recording(batch: StepBatch) -> object:
        if any(piece.proposed for piece in batch.slices):
            batches.append(batch)
        return submit(batch)

    engine_of(cluster).submit = recording
    return batches


async def answered(
    cluster: Cluster, asked: list[dict[str, Any]], prompts: list[list[int]]
) -> list[Request]:
    client = Client(cluster, "decode-0")
    requests = [
        client.submit(prompt, **{"max_tokens": 30, **rules})
        for prompt, rules in zip(prompts, asked, strict=True)
    ]
    for request in requests:
        await request.finished()
    await cluster.quiet()
    return requests


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.7, 0.0])
@on_virtual_time
async def test_answers_equal_those_of_plain_decoding(
    make_cluster: MakeCluster, share: float, local: bool
) -> None:
    prompts = [[*PROMPT, number] for number in range(len(RULES))]
    asked = [{"local": local, **rules} for rules in RULES]
    plain = await answered(make_cluster(step_s=STEP_S), asked, prompts)
    oracle = OracleProposer(share)
    oracle.texts = texts(*plain)
    cluster = make_cluster(step_s=STEP_S, proposer=oracle)
    batches = verified(cluster)
    requests = await answered(cluster, asked, prompts)
    assert [reported(request) for request in requests] == [reported(request) for request in plain]
    assert batches and oracle.open == 0
    accepted = sum(o.accepted_proposal for request in requests for o in request.outputs)
    rejected = sum(o.rejected_proposals for request in requests for o in request.outputs)
    proposed = sum(piece.proposed for batch in batches for piece in batch.slices)
    assert accepted + rejected == proposed
    assert (accepted > 0) == (share > 0) and (rejected > 0) == (share < 1)


@on_virtual_time
async def test_a_good_proposer_needs_fewer_steps(make_cluster: MakeCluster) -> None:
    plain = make_cluster(step_s=STEP_S)
    first = await answered(plain, [{"local": True}], [PROMPT])
    oracle = OracleProposer()
    oracle.texts = texts(*first)
    cluster = make_cluster(step_s=STEP_S, proposer=oracle, draft_tokens=4)
    await answered(cluster, [{"local": True}], [PROMPT])
    assert engine_of(plain).steps >= 30 and engine_of(cluster).steps <= 13


@pytest.mark.parametrize("proposer", [NgramProposer(), SuffixProposer()])
@on_virtual_time
async def test_proposers_of_the_product_change_no_token(
    make_cluster: MakeCluster, proposer: Proposer
) -> None:
    """Prompts that repeat make them propose; what the hashes draw agrees by chance alone."""
    prompts = [[3, 4, 5, 6] * 6, [*range(9)] * 3]
    asked: list[dict[str, Any]] = [{"local": True}, {"temperature": 1.0, "local": True, "n": 2}]
    plain = await answered(make_cluster(step_s=STEP_S), asked, prompts)
    cluster = make_cluster(step_s=STEP_S, proposer=proposer)
    requests = await answered(cluster, asked, prompts)
    assert [reported(request) for request in requests] == [reported(request) for request in plain]


@on_virtual_time
async def test_a_stop_token_within_accepted_proposals_ends_the_choice(
    make_cluster: MakeCluster,
) -> None:
    (plain,) = await answered(make_cluster(step_s=STEP_S), [{"local": True}], [PROMPT])
    oracle = OracleProposer()
    oracle.texts = texts(plain)
    cluster = make_cluster(step_s=STEP_S, proposer=oracle)
    for index in range(1, 20):
        stop = plain.tokens()[index]
        asked = [{"local": True, "stop": (stop,)}]
        (request,) = await answered(cluster, asked, [PROMPT])
        assert request.tokens() == plain.tokens()[: index + 1]
        assert request.end().end == worker_pb2.STOP


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
@on_virtual_time
async def test_nothing_is_verified_beyond_max_tokens(
    make_cluster: MakeCluster, max_tokens: int
) -> None:
    (plain,) = await answered(make_cluster(step_s=STEP_S), [{"local": True}], [PROMPT])
    oracle = OracleProposer()
    oracle.texts = texts(plain)
    cluster = make_cluster(step_s=STEP_S, proposer=oracle)
    batches = verified(cluster)
    asked = [{"local": True, "max_tokens": max_tokens}]
    for _ in range(2):  # the second worker knows what a step takes
        (request,) = await answered(cluster, asked, [PROMPT])
        assert request.tokens() == plain.tokens()[:max_tokens]
        assert request.end().end == worker_pb2.LENGTH
    last = len(PROMPT) + max_tokens - 1  # position of the last token, whose KV no step needs
    pieces = [piece for batch in batches for piece in batch.slices]
    assert all(piece.start + piece.proposed < last for piece in pieces)


@pytest.mark.parametrize("share", [1.0, 0.5])
@on_virtual_time
async def test_sequences_that_are_preempted_go_on_as_before(
    make_cluster: MakeCluster, share: float
) -> None:
    """So few blocks that all cannot stay; proposals take none that another sequence needs."""
    asked: list[dict[str, Any]] = [{"local": True, "temperature": 1.0, "max_tokens": 40}] * 4
    prompts = [[number, *range(6)] for number in range(4)]
    plain = await answered(make_cluster(step_s=STEP_S), asked, prompts)
    few = make_cluster(step_s=STEP_S, blocks=30)
    await answered(few, asked, prompts)
    oracle = OracleProposer(share)
    oracle.texts = texts(*plain)
    cluster = make_cluster(step_s=STEP_S, blocks=30, proposer=oracle)
    batches = verified(cluster)
    requests = await answered(cluster, asked, prompts)
    assert [reported(request) for request in requests] == [reported(request) for request in plain]
    audits = [each.decode["decode-0"].worker.audit()["preemptions"] for each in (few, cluster)]
    assert batches and 0 < audits[1] <= audits[0]


@on_virtual_time
async def test_a_migrated_request_speculates_from_its_accepted_tokens(
    make_cluster: MakeCluster,
) -> None:
    rules = {"local": True, "temperature": 1.0, "frequency_penalty": 0.4}
    (plain,) = await answered(make_cluster(step_s=STEP_S), [rules], [PROMPT])
    oracle = OracleProposer(0.8)
    oracle.texts = texts(plain)
    cluster = make_cluster(step_s=STEP_S, proposer=oracle)
    for accepted in (1, 7, 15):
        asked = {**rules, "accepted": plain.tokens()[:accepted]}
        (request,) = await answered(cluster, [asked], [PROMPT])
        assert request.tokens() == plain.tokens()[accepted:]


@on_virtual_time
async def test_published_blocks_hold_verified_tokens_alone(make_cluster: MakeCluster) -> None:
    """A prompt that continues an answer is matched with what plain decoding would have left."""
    (plain,) = await answered(make_cluster(step_s=STEP_S), [{"local": True}], [PROMPT])
    oracle = OracleProposer(0.6)
    oracle.texts = texts(plain)
    cluster = make_cluster(step_s=STEP_S, proposer=oracle)
    await answered(cluster, [{"local": True}], [PROMPT])
    whole = [*PROMPT, *plain.tokens()]
    other = make_cluster(step_s=STEP_S)
    (wanted,) = await answered(other, [{"local": True}], [whole])
    (request,) = await answered(cluster, [{"local": True}], [whole])
    assert request.tokens() == wanted.tokens()
    assert request.outputs[0].cached_tokens == (len(whole) - 1) // 4 * 4


@pytest.mark.parametrize("fault", ["fail", "break", "cancel", "memory"])
@on_virtual_time
async def test_a_fault_at_each_step_leaks_nothing(make_cluster: MakeCluster, fault: str) -> None:
    asked: list[dict[str, Any]] = [{"local": True, "n": 2, "temperature": 1.0}, {"local": True}]
    prompts = [PROMPT, [5] * 10]
    plain = await answered(make_cluster(step_s=STEP_S), asked, prompts)
    oracle = OracleProposer(0.8)
    oracle.texts = texts(*plain)
    cluster = make_cluster(step_s=STEP_S, proposer=oracle)
    engine, client = engine_of(cluster), Client(cluster, "decode-0")
    for number in range(1, 16):
        requests = [
            client.submit(prompt, **{"max_tokens": 30, **rules})
            for prompt, rules in zip(prompts, asked, strict=True)
        ]
        await at_step(engine, engine.steps + number, requests)
        if fault == "fail":
            engine.fail_steps = 1
        elif fault == "break":
            engine.break_slices = {0}
        elif fault == "memory":
            engine.memory_tokens = 0
        else:
            client.cancel(requests[0])
        if fault == "memory":
            await at_step(engine, engine.steps + 1, requests)
            engine.memory_tokens = 1 << 20
        for request, wanted in zip(requests, plain, strict=True):
            await request.finished()
            for choice in range(len(request.submit.choices)):
                tokens = wanted.tokens(choice)
                assert request.tokens(choice) == tokens[: len(request.tokens(choice))]
        await cluster.quiet()
        assert oracle.open == 0


async def at_step(engine: HashEngine, step: int, requests: list[Request]) -> None:
    """Wait for this step, or for the end of all requests: some need fewer steps."""
    async with asyncio.timeout(5):
        while engine.steps < step and not all(request.ended.is_set() for request in requests):
            await asyncio.sleep(STEP_S / 10)


@pytest.mark.parametrize("seed", range(8))
@on_virtual_time
async def test_random_requests_get_the_tokens_of_plain_decoding(
    make_cluster: MakeCluster, seed: int
) -> None:
    """Requests that arrive while others decode, by handoff and locally, in a small pool."""
    dice = random.Random(seed)
    asked, prompts = list[dict[str, Any]](), list[list[int]]()
    for _ in range(10):
        prompts.append([dice.randrange(50) for _ in range(dice.randrange(1, 30))])
        asked.append({**dice.choice(RULES), "local": dice.random() < 0.5})
        asked[-1]["max_tokens"] = dice.randrange(1, 30)
    plain = await answered(make_cluster(step_s=STEP_S), asked, prompts)
    oracle = OracleProposer(dice.choice((0.5, 0.9)), seed)
    oracle.texts = texts(*plain)
    cluster = make_cluster(step_s=STEP_S, blocks=60, proposer=oracle)
    requests = await answered(cluster, asked, prompts)
    assert [reported(request) for request in requests] == [reported(request) for request in plain]
    assert oracle.open == 0
