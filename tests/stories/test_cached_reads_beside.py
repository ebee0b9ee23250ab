"""READs of a conversation's history beside speculation, grammars and migration: the same tokens as
without, and only what no worker holds is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.proto import worker_pb2
from baton.runtime import handoff_metrics, metrics
from baton.runtime.grammar.grammar_text import regex_grammar
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.cluster import Cluster
from baton.simulation.fleet.oracle_proposer import OracleProposer
from tests.support.grammar_scene import END, small_vocabulary
from tests.support.metric_values import metric_value
from tests.support.virtual_time import on_virtual_time

BLOCK = 4
STEP_S = 0.004
HISTORY = list(range(100, 142))
ANSWER_TOKENS = 33
NEW = [7, 8, 9, 10, 11]
TEXT = regex_grammar("[ab]{25,30}c{2,4}")

MakeCluster = Callable[..., Cluster]


def computed_tokens() -> float:
    return metric_value(metrics.TOKENS.labels("prompt"))


def read_blocks() -> float:
    return metric_value(handoff_metrics.CACHED_READ_BLOCKS)


def held_blocks(prompt: list[int]) -> int:
    """Return how many blocks of a turn's history its decode worker holds: the last token of the
    answer was not computed."""
    return (len(prompt) - len(NEW) - 1) // BLOCK


async def second_turn(cluster: Cluster, **fields: Any) -> tuple[Request, list[int], Request]:
    """Ask both turns, the second with decode-0 as its source. Returns the second, its prompt, and
    the first."""
    first = Client(cluster, "decode-0").submit(HISTORY, **{"max_tokens": ANSWER_TOKENS, **fields})
    await first.finished()
    tokens = first.tokens()
    prompt = [*HISTORY, *tokens, *NEW]
    source = cluster.source("decode-0", held_blocks(prompt))
    request = Client(cluster, "decode-0").submit(
        prompt, **{"max_tokens": ANSWER_TOKENS, **fields}, source=source
    )
    await request.finished()
    return request, prompt, first


async def check_read(cluster: Cluster, **fields: Any) -> tuple[Request, Request]:
    """Ask both turns, and check that the second read its history. Returns both."""
    before, blocks = computed_tokens(), read_blocks()
    request, prompt, first = await second_turn(cluster, **fields)
    held = held_blocks(prompt)
    assert read_blocks() - blocks == held - len(HISTORY) // BLOCK
    assert computed_tokens() - before == len(HISTORY) + len(prompt) - held * BLOCK
    assert request.outputs[0].cached_tokens == held * BLOCK
    await cluster.quiet()
    return first, request


@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
@on_virtual_time
async def test_answers_under_speculation_are_read(make_cluster: MakeCluster, share: float) -> None:
    """What a decode worker computed for rejected proposals is in no block that it grants."""
    plain, prompt, _ = await second_turn(make_cluster(step_s=STEP_S))
    oracle = OracleProposer(share)
    oracle.texts = [[*prompt, *plain.tokens()]]
    cluster = make_cluster(step_s=STEP_S, proposer=oracle)
    first, request = await check_read(cluster)
    assert request.tokens() == plain.tokens() == request.expected()
    outputs = [*first.outputs, *request.outputs]
    rejected = sum(output.rejected_proposals for output in outputs)
    accepted = sum(output.accepted_proposal for output in outputs)
    assert (rejected > 0, accepted > 0) == (share < 1, share > 0) and oracle.open == 0


@pytest.mark.parametrize("share", [None, 0.6])
@on_virtual_time
async def test_answers_within_a_grammar_are_read(
    make_cluster: MakeCluster, share: float | None
) -> None:
    vocabulary = small_vocabulary()
    fields = {
        "grammar": worker_pb2.Grammar(text=TEXT, vocabulary=vocabulary.digest),
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 60,
        "stop": (END,),
    }

    def fleet(**settings: Any) -> Cluster:
        cluster = make_cluster(prefill=0, decode=0, step_s=STEP_S, **settings)
        cluster.vocabulary = vocabulary
        cluster.add_prefill("prefill-0", 256)
        cluster.add_decode("decode-0", 256)
        return cluster

    plain, prompt, _ = await second_turn(fleet(), **fields)
    oracle = OracleProposer(share or 0.0)
    oracle.texts = [[*prompt, *plain.tokens()]]
    cluster = fleet(proposer=oracle) if share else fleet()
    _, request = await check_read(cluster, **fields)
    assert request.tokens() == plain.tokens() and len(plain.tokens()) > 25
    assert request.end().end == worker_pb2.STOP


@pytest.mark.parametrize("accepted", [1, 9, ANSWER_TOKENS - 1])
@on_virtual_time
async def test_a_migrated_turn_reads_from_the_worker_that_has_it(
    make_cluster: MakeCluster, accepted: int
) -> None:
    """The second turn goes on at another decode worker after `accepted` tokens; history and first
    answer are read from the first worker, which still lives."""
    cluster = make_cluster(decode=2, step_s=STEP_S)
    whole, prompt, _ = await second_turn(cluster)
    before, blocks = computed_tokens(), read_blocks()
    begun = whole.tokens()[:accepted]
    fresh = cluster.add_prefill("prefill-1", 256)  # holds nothing
    (candidate,) = [each for each in cluster.candidates() if each.boot_id == fresh.worker.boot_id]
    cluster.candidates = lambda: [candidate]
    moved = Client(cluster, "decode-1").submit(
        prompt,
        max_tokens=ANSWER_TOKENS,
        accepted=begun,
        source=cluster.source("decode-0", held_blocks(prompt)),
    )
    await moved.finished()
    assert [*begun, *moved.tokens()] == whole.tokens()
    assert read_blocks() - blocks >= held_blocks(prompt)
    assert computed_tokens() - before <= len(prompt) + accepted - held_blocks(prompt) * BLOCK
    await cluster.quiet()
