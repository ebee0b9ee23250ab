"""A cluster of real workers on hash engines, closed after each test: within its virtual time, or
on the loop of a test that says nothing of time. Whatever happens in it, no block of a step under
way is given to another: a worker that does so ends, and its test fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from baton.decode_worker.speculator import Speculator
from baton.engine.scheduling.blocks import Hold
from baton.engine.speculation.proposer import Proposer
from baton.kv_transfer import checksum_numba
from baton.runtime.config import Config, HandoffConfig, PoolConfig, StepConfig
from baton.simulation.fleet.cluster import SLABS, Cluster, Node
from baton.simulation.fleet.hash_engine import block_bytes
from tests.support.virtual_time import at_the_end

BLOCK = 4
BLOCK_BYTES = block_bytes(BLOCK, SLABS)
PATIENT = (2.0, 1.5)  # lease and READ, on the machine's time, where a step may be late


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """A worker's process loads the kernel of checksums before it serves."""
    checksum_numba.warm_up()


def config(lease_s: float = 0.4, read_timeout_s: float = 0.3, **step: int | float) -> Config:
    settings: dict[str, int | float] = {
        "prefill_tokens": 32,
        "chunk_tokens": 16,
        "local_prefill_tokens": 8,
        "expected_growth_tokens": 8,
    }
    settings.update(step)
    return Config(
        pool=PoolConfig(block_size=BLOCK),
        step=StepConfig(**settings),
        handoff=HandoffConfig(
            lease_s=lease_s, read_timeout_s=read_timeout_s, read_bytes=3 * BLOCK_BYTES
        ),
    )


MakeCluster = Callable[..., Cluster]


def watch(node: Node[Any]) -> None:
    allocate = node.pool.allocate

    def watched(count: int, hold: Hold) -> list[int]:
        blocks = allocate(count, hold)
        slices = [piece for batch in node.engine.under_way for piece in batch.slices]
        assert not set(blocks) & {block for piece in slices for block in piece.blocks}
        return blocks

    node.pool.allocate = watched


@pytest.fixture
async def make_cluster() -> AsyncIterator[MakeCluster]:
    made: list[Cluster] = []

    def make(
        *,
        prefill: int = 1,
        decode: int = 1,
        blocks: int = 256,
        prefill_blocks: int = 256,
        step_s: float = 0.0,
        settings: Config | None = None,
        patient: bool = False,
        proposer: Proposer | None = None,
        draft_tokens: int = 6,
    ) -> Cluster:
        def speculator() -> Speculator | None:
            return None if proposer is None else Speculator(proposer, draft_tokens)

        chosen = settings or (config(*PATIENT) if patient else config())
        cluster = Cluster(chosen, lambda batch: step_s, speculator)
        try:
            at_the_end(cluster.close)
        except LookupError:  # on the machine's time
            made.append(cluster)
        for number in range(prefill):
            watch(cluster.add_prefill(f"prefill-{number}", prefill_blocks))
        for number in range(decode):
            watch(cluster.add_decode(f"decode-{number}", blocks))
        return cluster

    yield make
    for cluster in made:
        await cluster.close()
