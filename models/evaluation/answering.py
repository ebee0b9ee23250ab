"""Greedy answers of a model folder through the engine, many at once.

Steps go to the engine's runner as in serving: prompts in chunks, then one token of every open
answer a step. Knows no tasks. Owns the engine's pool and gives each answer its own blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.runtime.errors import EngineError
from baton.runtime.sampling import SamplingParams

_BLOCK_TOKENS = 16
_AT_ONCE = 64  # open answers
_STEP_TOKENS = 8192  # of prompts that are computed in one step
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class _Open:
    index: int  # in the caller's list
    prompt: Sequence[int]
    most: int
    blocks: range
    said: list[int] = field(default_factory=list)

    def slice(self) -> Slice:
        position = len(self.prompt) + len(self.said)
        draws = (Draw(0, position, _GREEDY),)
        if not self.said:
            return Slice(self.prompt, 0, self.blocks, draws)
        return Slice(self.said[-1:], position - 1, self.blocks, draws)


class ModelAnswers:
    """One model. Raises ModelError as the engine does for a folder that it cannot load."""

    def __init__(
        self,
        folder: Path,
        context: int = 2048,
        *,
        dtype: str = "auto",
        quantization: str = "none",
        kv_dtype: str = "auto",
    ) -> None:
        """The last three: see `build_runner`."""
        self._each = -(-context // _BLOCK_TOKENS)
        self._runner = build_runner(
            folder,
            EngineOptions(
                blocks=self._each * _AT_ONCE,
                block_size=_BLOCK_TOKENS,
                dtype=dtype,
                quantization=quantization,
                kv_dtype=kv_dtype,
            ),
        )
        self._ends = frozenset(self._runner.spec.eos_ids)

    def greedy(self, prompts: Sequence[Sequence[int]], most: Sequence[int]) -> list[list[int]]:
        """Return for each prompt up to `most` tokens, which end with the end token if one is said.
        Raises EngineError if the model's numbers are not finite."""
        found: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        for first in range(0, len(order), _AT_ONCE):
            indices = order[first : first + _AT_ONCE]
            open_now = [
                _Open(index, prompts[index], most[index], self._blocks(at))
                for at, index in enumerate(indices)
            ]
            for answer in self._answered(open_now):
                found[answer.index] = answer.said
        return found

    def best(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        """The likeliest next token after each token of each sequence."""
        found: list[list[int]] = []
        for tokens in sequences:
            batch = StepBatch((Slice(tokens, 0, self._blocks(0)),))
            (logits,) = self._logits(batch)
            found.append([int(token) for token in logits.argmax(-1)])
        return found

    def _logits(self, batch: StepBatch) -> list[Tensor]:
        return self._runner.all_logits(batch)

    def _blocks(self, at: int) -> range:
        return range(at * self._each, (at + 1) * self._each)

    def _answered(self, waiting: list[_Open]) -> list[_Open]:
        everyone = list(waiting)
        for group in _groups(waiting):
            self._step(group)
        while waiting := [each for each in waiting if self._goes_on(each)]:
            self._step(waiting)
        return everyone

    def _goes_on(self, answer: _Open) -> bool:
        return len(answer.said) < answer.most and answer.said[-1] not in self._ends

    def _step(self, answers: list[_Open]) -> None:
        result = self._runner.run(StepBatch(tuple(each.slice() for each in answers)))
        if result.broken:
            raise EngineError("the model's numbers are not finite: train it again")
        for answer, drawn in zip(answers, result.drawn, strict=True):
            answer.said.append(drawn[0].token)


def _groups(answers: list[_Open]) -> list[list[_Open]]:
    """Divide answers into groups whose prompts are computed in one step."""
    groups: list[list[_Open]] = [[]]
    tokens = 0
    for answer in answers:
        tokens += len(answer.prompt)
        if groups[-1] and tokens > _STEP_TOKENS:
            groups.append([])
            tokens = len(answer.prompt)
        groups[-1].append(answer)
    return groups
