"""One sequence on a runner with a draft model or head: its prompt, then steps that speculate."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.batch import DraftWork, Draw, Slice, StepBatch
from baton.engine.scheduling.token_history import PromptTokens, Text
from baton.engine.scheduling.verification import with_proposals
from baton.runtime.sampling import SamplingParams


class DraftedSequence:
    """The output of one sequence, what each step has proposed, and how much of it it accepted."""

    def __init__(
        self,
        runner: ModelRunner,
        prompt: Sequence[int],
        blocks: Sequence[int],
        rule: SamplingParams,
        length: int = 4,
    ) -> None:
        """`length`: proposals of a step."""
        self.runner, self.blocks, self.rule, self.length = runner, blocks, rule, length
        self.prompt = list(prompt)
        self.output: list[int] = []
        self.proposed: list[tuple[int, ...]] = []
        self.accepted: list[int] = []
        self._text = Text(PromptTokens(self.prompt), self.output)

    def prefill(self) -> None:
        item = Slice(self.prompt, 0, self.blocks, self._draws(1), draft=DraftWork())
        self._run(item)

    def decode(self, tokens: int) -> list[int]:
        """Speculate until there are so many tokens of output, and return them."""
        known = len(self.prompt)
        while len(self.output) < tokens:
            start = len(self.prompt) + len(self.output) - 1
            work = DraftWork([*self.prompt, *self.output][known:start], self.length)
            draws = self._draws(self.length + 1)
            drawn = self._run(Slice(self.output[-1:], start, self.blocks, draws, draft=work))
            self.accepted.append(drawn - 1)
            known = min(start + drawn, start + self.length)
        return self.output[:tokens]

    def plain(self, tokens: int) -> list[int]:
        """Decode without proposals until there are so many tokens of output, and return them."""
        while len(self.output) < tokens:
            start = len(self.prompt) + len(self.output) - 1
            self._run(Slice(self.output[-1:], start, self.blocks, self._draws(1)))
        return self.output

    def verify(self, wanted: Sequence[int], right: int) -> list[int]:
        """Verify proposals of which `right` equal the tokens `wanted`, and return the output, as
        long as `wanted`."""
        while len(self.output) < len(wanted):
            made = len(self.output)
            texts = [*wanted[made : made + right], *[token ^ 1 for token in wanted[made + right :]]]
            given = texts[: min(self.length, len(wanted) - made - 1)]
            draws = self._draws(self.length + 1)
            item = Slice(self.output[-1:], len(self.prompt) + made - 1, self.blocks, draws)
            self.accepted.append(self._run(with_proposals(item, given)) - 1)
        return self.output

    def _run(self, item: Slice) -> int:
        result = self.runner.run(StepBatch((item,)))
        assert not result.broken and not result.failed
        self.output += [each.token for each in result.drawn[0]]
        if item.draft is not None and item.draft.tokens:
            self.proposed.append(result.proposed[0])
        return len(result.drawn[0])

    def _draws(self, count: int) -> tuple[Draw, ...]:
        made = len(self.output)
        history = self._text.until(made) if self.rule.needs_history else None
        first = len(self.prompt) + made
        return tuple(
            Draw(0, first + row, self.rule.at(made + row), history) for row in range(count)
        )
