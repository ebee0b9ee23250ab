"""How the tokens of a request are drawn: plain values that router, workers and engine share.

Pure standard library: engine/ imports it too. `runtime/wire.py` reads it from a message.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def needs_history(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )
