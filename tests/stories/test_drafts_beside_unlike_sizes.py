"""A draft model beside prefill and decode workers with blocks of unlike sizes: the KV of both
models is put in order, and the tokens are those without proposals."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton.decode_worker.speculator import Speculator
from baton.engine.speculation.draft_length import DraftLengthPolicy
from baton.models.embedded import embedded_model
from baton.proto import worker_pb2
from baton.runtime import handoff_metrics, metrics
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.model_cluster import ModelCluster
from tests.support.machine_speed import slowness
from tests.support.metric_values import metric_value

DRAFT = Path(__file__).parents[2] / "models" / "baton-tiny-draft"
LISTS = ("pear, apple", "plum, grape, lemon, fig", "one, two, three, four, five, six, seven")
TOKENIZER = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
PROMPTS = [
    TOKENIZER.encode(f"<|user|>Copy this list: {items}<|end|><|assistant|>").ids for items in LISTS
]
OUTPUT = 14


async def answers(prefill: int, decode: int, draft: Path | None) -> list[list[int]]:
    """Return the tokens of all prompts, served at once."""
    cluster = ModelCluster(
        embedded_model(),
        block_size=prefill,
        dtype="float32",
        deterministic=False,
        draft=draft,
        speculator=lambda: Speculator(None, 4, "draft") if draft else None,
    )
    try:
        cluster.add_prefill("prefill-0", 80)
        cluster.block_size = decode
        cluster.add_decode("decode-0", 80)
        for engine in cluster.engines:  # a row that reads an unwritten token shows it
            engine.pool.tensor.fill_(float("nan"))
            if engine.pool.draft is not None:
                engine.pool.draft.tensor.fill_(float("nan"))
        client = Client(cluster, "decode-0")
        requests = [
            client.submit(prompt, max_tokens=OUTPUT, temperature=number % 2, seed=number + 1)
            for number, prompt in enumerate(PROMPTS)
        ]
        await asyncio.gather(*(request.finished(60 * slowness()) for request in requests))
        assert [request.end().end for request in requests] == [worker_pb2.LENGTH] * len(requests)
        await cluster.quiet()
        return [request.tokens() for request in requests]
    finally:
        await cluster.close()


@pytest.fixture
def always_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Propose three tokens in each step: lengths follow times, which a busy machine distorts."""
    monkeypatch.setattr(DraftLengthPolicy, "may_propose", lambda self, sequences: True)
    monkeypatch.setattr(
        DraftLengthPolicy, "choose", lambda self, sequences, limits: [min(n, 3) for n in limits]
    )


@pytest.mark.usefixtures("always_three")
@pytest.mark.parametrize(
    ("prefill", "decode"), [(16, 8), pytest.param(8, 16, marks=pytest.mark.nightly)]
)
async def test_a_draft_changes_no_token_between_unlike_sizes(prefill: int, decode: int) -> None:
    expected = await answers(8, 8, None)
    accepted = metric_value(metrics.ACCEPTED_TOKENS.labels("draft"))
    put_in_order = metric_value(handoff_metrics.REORDERED_BLOCKS)
    assert await answers(prefill, decode, DRAFT) == expected
    assert metric_value(metrics.ACCEPTED_TOKENS.labels("draft")) > accepted
    blocks = sum(-(-len(prompt) // prefill) for prompt in PROMPTS)
    assert metric_value(handoff_metrics.REORDERED_BLOCKS) - put_in_order == blocks
