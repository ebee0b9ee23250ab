"""A draft model beside KV in eight bits of a bfloat16 model, whose draft's KV lies in the same
blocks: by handoff or not, the tokens are those of the same workers without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.decode_worker.speculator import Speculator
from baton.models.random_model import make_shaped_model
from benchmarks.fleets.fixed_speculators import FixedDraft
from benchmarks.speculation import Served, cluster_of, serve
from tests.support.model_story import random_prompt

TOKENS = 16
RULES: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 3})
ASKED = [
    {"prompt": random_prompt(length, vocab=3000), "max_tokens": TOKENS, "local": local, **rule}
    for length, local in ((40, True), (61, False))
    for rule in RULES
]
nightly = pytest.mark.nightly


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Makes a model of sizes that the bfloat16 kernels take, with so many KV heads."""

    def make(kv_heads: int) -> Path:
        return make_shaped_model(
            tmp_path_factory.mktemp(f"heads-{kv_heads}"),
            layers=2,
            hidden=128,
            heads=4 if kv_heads == 2 else kv_heads,
            kv_heads=kv_heads,
            head_dim=64,
            ffn=192,
            vocab=4096,
            dtype="bfloat16",
            seed=5,
        )

    return make


async def answers(
    target: Path, make: Callable[[], Speculator | None], draft: Path | None, **how: Any
) -> Served:
    async with cluster_of(target, make, draft=draft, dtype="bfloat16", **how) as cluster:
        served = await serve(cluster, ASKED, at_once=len(ASKED))
        await cluster.quiet()
        return served


@pytest.mark.parametrize(
    ("kv_dtype", "draft_heads", "ranks"),
    [
        ("int8", 2, (1, 1)),  # the model itself: most proposals are accepted
        ("int8", 3, (1, 1)),
        pytest.param("fp8_e4m3", 2, (1, 1), marks=nightly),
        pytest.param("int8", 2, (2, 1), marks=nightly),  # the ranks share the draft model
        pytest.param("int8", 3, (1, 2), marks=nightly),  # the leader computes it alone
    ],
)
async def test_a_draft_changes_no_token(
    model: Callable[[int], Path], kv_dtype: str, draft_heads: int, ranks: tuple[int, int]
) -> None:
    target, how = model(2), {"kv_dtype": kv_dtype, "ranks": ranks}
    plain = await answers(target, lambda: None, None, **how)
    draft = target if draft_heads == 2 else model(draft_heads)
    found = await answers(target, partial(FixedDraft, 4), draft, **how)
    assert found.answers == plain.answers
    assert all(len(answer) == TOKENS for answer in plain.answers)
    assert len({token for answer in plain.answers for token in answer}) > TOKENS
    assert draft_heads == 3 or found.accepted_share > 0.3
