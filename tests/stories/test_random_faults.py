"""Many small disasters at once, drawn from a seed: every request still ends exactly once, with the
right tokens as far as it came, and nothing is left over.

`BATON_SEEDS=1000` tries more seeds; `BATON_SEED=17` repeats one. On virtual time.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable

import pytest

from baton.engine.scheduling.batch import StepBatch
from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.proto import worker_pb2
from baton.runtime.config import Config, HandoffConfig, PoolConfig, StepConfig
from baton.runtime.errors import BatonError, Overloaded
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.cluster import SLABS, Cluster
from baton.simulation.fleet.hash_engine import block_bytes
from tests.support.virtual_time import on_virtual_time

MakeCluster = Callable[..., Cluster]

SEEDS = (
    [int(os.environ["BATON_SEED"])]
    if "BATON_SEED" in os.environ
    else range(int(os.environ.get("BATON_SEEDS", "60")))
)
WHOLE = (worker_pb2.LENGTH, worker_pb2.STOP)
TICK_S = 0.002


class Disaster:
    """One seed: a cluster, what befalls it, and what was asked of it."""

    def __init__(self, seed: int, make_cluster: MakeCluster) -> None:
        self.dice = random.Random(seed)
        self.cluster = make_cluster(
            prefill=self.dice.randint(1, 2),
            blocks=self.dice.choice([14, 20, 40]),
            prefill_blocks=self.dice.choice([12, 30]),
            settings=self._config(),
        )
        self.step_s = self.dice.choice([0.0, 0.001, 0.004])
        self.faults = self.dice.choice([0.0, 0.1, 0.3])
        for node in [*self.cluster.prefill.values(), *self.cluster.decode.values()]:
            node.engine.step_s = self._step_time
        self.cluster.exchange.decide = self._fate
        self.cluster.exchange.checksum_s = self.dice.choice([0.0, 0.001])
        self.client = Client(self.cluster, "decode-0")
        self.accepted: list[Request] = []
        self.prefixes = [[p] * 24 for p in range(3)]
        self.workers = 0

    def _config(self) -> Config:
        dice = self.dice
        return Config(
            pool=PoolConfig(block_size=4),
            step=StepConfig(
                prefill_tokens=16,
                chunk_tokens=8,
                local_prefill_tokens=dice.choice([2, 8]),
                expected_growth_tokens=dice.choice([1, 8]),
                max_sequences=dice.choice([4, 16]),
                max_queue=dice.choice([2, 16]),
                waiting_share=dice.choice([0.5, 1.0]),
            ),
            handoff=HandoffConfig(
                lease_s=0.2,
                read_timeout_s=0.05,
                read_bytes=2 * block_bytes(4, SLABS),
                window_reads=2,
            ),
        )

    def _step_time(self, batch: StepBatch) -> float:
        return self.step_s * self.dice.random()

    def _fate(self, attempt: Attempt) -> Fate:
        dice = self.dice
        delay_s = dice.choice([0.0, 0.0, 0.002, 0.01])
        if dice.random() >= self.faults:
            return Fate(delay_s)
        what = dice.choice(["failed", "stuck", "corrupt"])
        if what == "corrupt":
            return Fate(delay_s, corrupt=dice.randrange(len(attempt.local)))
        return Fate(delay_s, failed=what == "failed", stuck=what == "stuck")

    def submit(self) -> None:
        dice = self.dice
        prompt = dice.choice(self.prefixes)[: dice.randint(1, 24)]
        prompt = prompt + [dice.randrange(100) for _ in range(dice.choice([0, 1, 3, 8]))]
        try:
            request = self.client.submit(
                prompt,
                max_tokens=dice.choice([1, 2, 6, 16]),
                n=dice.choice([1, 1, 2, 3]),
                local=dice.random() < 0.3,
                temperature=dice.choice([0.0, 1.0]),
                seed=dice.randrange(5),
                deadline_ms=dice.choice([0, 0, 0, 5, 40]),
            )
        except BatonError as refusal:
            self.client.requests[-1].ended.set()
            assert isinstance(refusal, Overloaded) or "KV blocks" in str(refusal)
        else:
            self.accepted.append(request)

    def cancel(self) -> None:
        if self.accepted:
            self.client.cancel(self.dice.choice(self.accepted[-4:]))

    def fail_a_step(self) -> None:
        if self.faults:
            nodes = [*self.cluster.prefill.values(), *self.cluster.decode.values()]
            self.dice.choice(nodes).engine.fail_steps = 1

    def break_a_slice(self) -> None:
        if self.faults:
            nodes = [*self.cluster.prefill.values(), *self.cluster.decode.values()]
            self.dice.choice(nodes).engine.break_slices = {0}

    def release(self) -> None:
        self.cluster.exchange.release_stuck()

    async def break_a_stream(self) -> None:
        if self.faults and self.cluster.open_links:
            link, _ = self.dice.choice(self.cluster.open_links[-3:])
            await link.close()

    async def change_fleet(self) -> None:
        names = list(self.cluster.prefill)
        if self.faults and names and self.dice.random() < 0.5:
            await self.cluster.kill_prefill(self.dice.choice(names))
        else:
            self.workers += 1
            node = self.cluster.add_prefill(f"late-{self.workers}", 30)
            node.engine.step_s = self._step_time

    async def run(self) -> None:
        for _ in range(self.dice.randint(10, 30)):
            action = self.dice.choices(
                [
                    self.submit,
                    self.cancel,
                    self.fail_a_step,
                    self.break_a_slice,
                    self.release,
                    self.change_fleet,
                    self.break_a_stream,
                ],
                [12, 4, 1, 1, 2, 1, 1],
            )[0]
            if (waiting := action()) is not None:
                await waiting
            for _ in range(self.dice.choice([0, 0, 1, 3])):
                await asyncio.sleep(TICK_S * self.dice.random())


def check(request: Request) -> None:
    """One end for each choice, last; the right tokens, all of them unless it was cut off."""
    for choice in range(len(request.submit.choices)):
        tokens, expected = request.tokens(choice), request.expected(choice)
        ends = [o.end for o in request.outputs if o.choice == choice and o.end]
        assert len(ends) == 1, (request.submit.request_id, choice, ends)
        assert tokens == expected[: len(tokens)], (request.submit.request_id, choice)
        if ends[0] in WHOLE:
            assert tokens == expected, (request.submit.request_id, choice)


async def ended(disaster: Disaster) -> None:
    """Until every request has ended; READs that are stuck land after a while."""
    async with asyncio.timeout(20):
        while not all(request.ended.is_set() for request in disaster.accepted):
            await asyncio.sleep(0.02)
            disaster.cluster.exchange.release_stuck()


@pytest.mark.parametrize("seed", SEEDS)
@on_virtual_time
async def test_every_request_ends_once_and_nothing_is_left(
    make_cluster: MakeCluster, seed: int
) -> None:
    disaster = Disaster(seed, make_cluster)
    await disaster.run()
    try:
        await ended(disaster)
    except TimeoutError:
        audit = disaster.cluster.decode["decode-0"].worker.audit()
        raise AssertionError(f"seed {seed}: requests never end; {audit}") from None
    for request in disaster.accepted:
        check(request)
    for node in [*disaster.cluster.decode.values(), *disaster.cluster.prefill.values()]:
        assert not node.task.done(), f"seed {seed}: {node.worker.worker_id}'s loop has ended"
    disaster.cluster.exchange.release_stuck()
    await disaster.cluster.quiet()
