"""Measure the time to the first token where the two ends of a handoff have unlike numbers of ranks.

    prefill worker of T ranks ─┬─▶ decode worker of T ranks
                               └─▶ decode worker of another number

Both decode workers read from the same prefill worker, so that the prompt's computation is the same.
They are asked in turn, with new prompts, and swap their order each round.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fleets.worker_pair import RouterLink, WorkerPair

PAIRS = ((1, 2), (2, 1))  # ranks of the prefill worker and of the unlike decode worker
OUTPUT_TOKENS = 2


async def unlike_ratios(
    model: Path,
    settings: Sequence[str],
    pair: tuple[int, int],
    prompt: tuple[range, int],
    rounds: int,
) -> list[float]:
    """Return the ratio of each round, unlike over equal. `prompt`: its tokens, and their number."""
    prefill, unlike = ([f"worker.tp={ranks}"] for ranks in pair)
    workers = WorkerPair(model, settings, {"prefill": prefill, "decode": prefill}, more=[unlike])
    dice = random.Random(os.urandom(8))
    try:
        records = workers.wait_ready()
        links = [
            RouterLink(records | {"decode": record}, workers.token, workers.tls)
            for record in (records["decode"], workers.record("decode-1"))
        ]
        for link in links:
            await link.open()
        found = []
        for number in range(-1, rounds):
            seconds = [0.0, 0.0]
            for place in (0, 1) if number % 2 else (1, 0):
                tokens = dice.choices(prompt[0], k=prompt[1])
                answer = await links[place].ask(tokens, OUTPUT_TOKENS, local=False)
                seconds[place] = answer.ttft_s
            found += [seconds[1] / seconds[0]] if number >= 0 else []
        for link in links:
            await link.close()
        return found
    finally:
        workers.close()
