"""Measure the time to the first and to the second token where the two ends of a handoff differ: in
their numbers of ranks, or in the size of their blocks.

    prefill worker ─┬─▶ decode worker like it
                    └─▶ decode worker unlike it

Both decode workers read from the same prefill worker, so that the prompt's computation is the same.
They are asked in turn, with new prompts, and swap their order each round. The first token is drawn
by the prefill worker; the second one needs all of the KV, read, verified and put in order.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleets.worker_pair import RouterLink, WorkerPair

OUTPUT_TOKENS = 2


@dataclass(frozen=True, slots=True)
class UnlikePair:
    """The settings of the prefill worker and of the unlike decode worker. `block_size`: tokens of
    the prefill worker's blocks, where the others' differ; else 0."""

    name: str
    prefill: tuple[str, ...]
    unlike: tuple[str, ...]
    block_size: int = 0


def of_ranks(prefill: int, unlike: int) -> UnlikePair:
    return UnlikePair(f"{prefill}_{unlike}", (f"worker.tp={prefill}",), (f"worker.tp={unlike}",))


def of_sizes(prefill: int, unlike: int, pool_tokens: int) -> UnlikePair:
    own, other = (
        (f"pool.block_size={size}", f"pool.blocks={pool_tokens // size}")
        for size in (prefill, unlike)
    )
    return UnlikePair(f"{prefill}_{unlike}", own, other, prefill)


async def unlike_ratios(
    model: Path,
    settings: Sequence[str],
    pair: UnlikePair,
    prompt: tuple[range, int],
    rounds: int,
) -> list[tuple[float, float]]:
    """Return each round's ratios, unlike over alike, of the times to the first and to the second
    token. `prompt`: its tokens, and their number."""
    by_role = {"prefill": pair.prefill, "decode": pair.prefill}
    workers = WorkerPair(model, settings, by_role, more=[pair.unlike])
    dice = random.Random(os.urandom(8))
    try:
        records = workers.wait_ready()
        links = [
            RouterLink(records | {"decode": record}, workers.token, workers.tls)
            for record in (records["decode"], workers.record("decode-1"))
        ]
        for link in links:
            link.candidate.block_size = pair.block_size
            await link.open()
        found = []
        for number in range(-1, rounds):
            seconds = [(0.0, 0.0)] * 2
            for index in (0, 1) if number % 2 else (1, 0):
                tokens = dice.choices(prompt[0], k=prompt[1])
                answer = await links[index].ask(tokens, OUTPUT_TOKENS, local=False)
                seconds[index] = answer.ttft_s, answer.ttft_s + answer.gaps_s[0]
            (first, second), (unlike_first, unlike_second) = seconds
            found += [(unlike_first / first, unlike_second / second)] if number >= 0 else []
        for link in links:
            await link.close()
        return found
    finally:
        workers.close()
