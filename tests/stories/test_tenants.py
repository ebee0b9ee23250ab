"""One tenant's flood of prompts leaves another's cached prefix where it is: on the decode worker,
and on the prefill worker that makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.runtime.config import Config, HandoffConfig, PoolConfig, StepConfig
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import Cluster
from tests.support.virtual_time import on_virtual_time

MakeCluster = Callable[..., Cluster]
MINE, THEIRS = b"m" * 32, b"t" * 32
PROMPT = list(range(40))


def config(tenant_share: float) -> Config:
    return Config(
        pool=replace(PoolConfig(), block_size=4, tenant_share=tenant_share),
        step=StepConfig(prefill_tokens=32, chunk_tokens=16, local_prefill_tokens=16),
        handoff=HandoffConfig(lease_s=2.0),
    )


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(("share", "kept"), [(0.5, True), (1.0, False)])
@on_virtual_time
async def test_a_flood_takes_its_own_prefixes_first(
    make_cluster: MakeCluster, share: float, kept: bool, local: bool
) -> None:
    cluster = make_cluster(blocks=40, prefill_blocks=40, settings=config(share))
    client = Client(cluster, "decode-0")

    async def ask(prompt: list[int], salt: bytes) -> int:
        """How many of its tokens were cached."""
        request = client.submit(prompt, max_tokens=2, local=local, salt=salt)
        await request.finished(20)
        return max(output.cached_tokens for output in request.outputs)

    assert await ask(PROMPT, MINE) == 0
    for number in range(12):  # ten blocks each, of a pool of forty
        await ask([number] * 40, THEIRS)
    assert await ask(PROMPT, MINE) == (36 if kept else 0)
    nodes = [cluster.decode["decode-0"]] if local else [*cluster.prefill.values()]
    assert all(node.pool.counts().total == 40 for node in nodes)
    await cluster.quiet()
