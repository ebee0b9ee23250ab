"""The speed-up by proposals that are right with a given probability, over its theoretical limit.

    measured = seconds without / seconds with      of one answer, from its first token to its last
    formula  = (1 + a + .. + a^k) / (step of k + 1 rows / step of one row)

Both come from the same run of two decode workers in one process, which take turns: one only
measures its steps, the other verifies k proposals of an oracle in each.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from baton.decode_worker.speculator import Speculator
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import Cluster
from baton.simulation.fleet.oracle_proposer import OracleProposer
from benchmarks.fleets.fixed_speculators import FixedSpeculator

WITHIN_S = 600.0
POLL_S = 0.0005
PROMPT_TOKENS = 64


class OraclePair:
    """Makes the speculators of "decode-0", which has no proposals, and "decode-1", which has
    `longest` in each step, and compares the two."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._oracle = OracleProposer(1.0)
        self._made: list[FixedSpeculator] = []
        self.speedups: dict[float, list[float]] = {}  # by share, of each round

    def speculator(self) -> Speculator:
        self._made.append(FixedSpeculator(self._oracle, self._longest if self._made else 0))
        return self._made[-1]

    async def ratios(
        self,
        cluster: Cluster,
        vocabulary: int,
        shares: Sequence[float],
        *,
        rounds: int,
        tokens: int,
        **sampling: Any,
    ) -> dict[float, list[float]]:
        """Return the measured speed-up over the formula, for each share one of each round, of
        answers of `tokens`. `sampling`: fields of the message of this name. Where rounding may
        change a token, the oracle knows nothing from there on."""
        dice = random.Random(0)
        prompt = [dice.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
        ask = {"prompt": prompt, "max_tokens": tokens, "local": True, **sampling}
        off, on = (Client(cluster, name) for name in ("decode-0", "decode-1"))
        answer, _ = await timed(off, ask)
        self._oracle.texts = [[*prompt, *answer]]
        ratios: dict[float, list[float]] = {share: [] for share in shares}
        self.speedups = {share: [] for share in shares}
        for number in range(-1, rounds):
            for share in shares:
                self._oracle.share = share
                _, off_s = await timed(off, ask)
                _, on_s = await timed(on, ask)
                if number >= 0:
                    self.speedups[share].append(off_s / on_s)
                    ratios[share].append(off_s / on_s / self._formula(share))
        return ratios

    def _formula(self, share: float) -> float:
        off, on = (each.policy.step_costs for each in self._made)
        cost = float(on.seconds(self._longest + 1)) / float(off.seconds(1))
        return sum(share**index for index in range(self._longest + 1)) / cost


async def timed(client: Client, ask: dict[str, Any]) -> tuple[list[int], float]:
    """Return an answer, and the seconds from its first token to its last."""
    request = client.submit(**ask)
    await until(lambda: bool(request.outputs))
    started_s = time.perf_counter()
    await request.finished(WITHIN_S)
    return request.tokens(), time.perf_counter() - started_s


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds. Raises TimeoutError."""
    async with asyncio.timeout(WITHIN_S):
        for _ in range(int(WITHIN_S / POLL_S)):
            if condition():
                return
            # The condition is read from workers, which have no common event.
            await asyncio.sleep(POLL_S)
