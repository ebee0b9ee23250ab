"""How the tokens of a request are drawn: plain values that router, workers and engine share.

Pure standard library: engine/ imports it too. `runtime/wire.py` reads it from a message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

MAX_LOGPROBS = 64  # best tokens beside a drawn one
MAX_DRAFT_TOKENS = 32  # proposed for one sequence in a step


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw. Neutral values switch a rule off; temperature 0 is greedy.

    Order: penalties and bias on the logits, temperature, then top-k, top-p, min-p; the draw
    depends on (seed, choice, absolute position) alone.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # over output
    presence_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    top_logprobs: int | None = None  # None: no logprobs; k: the drawn token's and the k best
    min_tokens: int = 0  # of output; before it no token of `barred` is drawn
    barred: tuple[int, ...] = ()
    prompt_logprobs: int | None = None  # None: none; k: each prompt token's and the k best
    _early: SamplingParams | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.min_tokens and self.barred:
            barred = tuple((token, -math.inf) for token in self.barred)
            early = replace(self, logit_bias=(*self.logit_bias, *barred), min_tokens=0, barred=())
            object.__setattr__(self, "_early", early)

    def at(self, index: int) -> SamplingParams:
        """How to draw the output token of this index: barred tokens have a bias that nothing
        outweighs."""
        early = index < self.min_tokens and self._early
        return early or self

    @property
    def needs_history(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )
