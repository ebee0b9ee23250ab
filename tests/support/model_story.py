"""Sequences on a runner of a small model: prompts, greedy slices and the tokens that are drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.runtime.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class ModelStory:
    """Runs sequences on a runner, with blocks taken from the pool at random."""

    def __init__(self, folder: Path, *, seed: int = 0, block_size: int = 8, **how: Any) -> None:
        self.runner: ModelRunner = build_runner(
            folder,
            EngineOptions(
                blocks=160, block_size=block_size, dtype=how.pop("dtype", "float32"), **how
            ),
        )
        pool = self.runner.pool  # a row that reads an unwritten token shows it
        (pool.tensor if pool.scales is None else pool.scales).fill_(float("nan"))
        self.block_size = block_size
        self._free = list(range(160))
        random.Random(seed).shuffle(self._free)

    def blocks(self, tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-tokens // self.block_size))]

    def release(self, *slices: Slice) -> None:
        """The blocks of `slices` may be taken again, once the step to come is over."""
        for item in slices:
            self._free[:0] = item.blocks

    def logits(self, *slices: Slice) -> list[torch.Tensor]:
        return self.runner.all_logits(StepBatch(slices))

    def draw(self, *slices: Slice) -> list[int]:
        """The first drawn token of every slice that draws."""
        result = self.runner.run(StepBatch(slices))
        assert not result.broken
        return [drawn[0].token for drawn in result.drawn if drawn]

    def greedy(
        self, tokens: Sequence[int], blocks: Sequence[int], steps: int, start: int = 0
    ) -> list[int]:
        """Compute `tokens` from `start` in one slice, then decode alone."""
        known, out = len(tokens), []
        todo = list(tokens[start:])
        for _ in range(steps):
            out += self.draw(greedy_slice(todo, start, blocks))
            start, todo = known, [out[-1]]
            known += 1
        return out


def greedy_slice(tokens: Sequence[int], start: int, blocks: Sequence[int]) -> Slice:
    return Slice(tokens, start, blocks, (Draw(0, start + len(tokens), GREEDY),))


def random_prompt(length: int, seed: int = 0, vocab: int = 199) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(vocab) for _ in range(length)]
