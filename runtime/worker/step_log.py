"""The last steps of a worker with the work that each had and the time that it took: a planner fits
its timing model to them. One step in STEP_PAUSE_S is kept, so that the log costs a busy worker
nothing and reaches further back. Load reports carry the last one of each kind to the routers. Owned
by the worker's loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from baton.proto import worker_pb2
from baton.runtime.config import StepConfig
from baton.runtime.worker.attention_pairs import causal_pairs

KEPT = 96  # steps with prompt tokens, and as many without
STEP_PAUSE_S = 0.1
_MAX_MICROS = (1 << 32) - 1

Row = tuple[int, int, int, int, float]


class StepLog:
    """`due` asks whether a step should be recorded, `record` keeps it."""

    def __init__(self, config: StepConfig) -> None:
        self._limits = {
            "prefill_tokens": config.prefill_tokens,
            "chunk_tokens": config.chunk_tokens,
            "local_prefill_tokens": config.local_prefill_tokens,
            "max_sequences": config.max_sequences,
        }
        self._rows: tuple[deque[Row], deque[Row]] = (deque(maxlen=KEPT), deque(maxlen=KEPT))
        self._kept_s = [-STEP_PAUSE_S, -STEP_PAUSE_S]
        self._verifying = 0
        self._numbers = [0, 0]  # of the last step recorded, without and with prompt tokens

    def due(self, ended_s: float, *, chunks: bool, verifies: bool = False) -> bool:
        """Return whether a step that ended now should be recorded. One that verifies proposals has
        other costs for each of its tokens: it is counted alone."""
        self._verifying += verifies
        return not verifies and ended_s - self._kept_s[chunks] >= STEP_PAUSE_S

    def record(
        self,
        spans: Sequence[tuple[int, int]],
        contexts: Sequence[int],
        ended_s: float,
        seconds: float,
    ) -> None:
        """Record a step: `spans` are the prompt tokens [start, end) of its chunks, `contexts` the
        tokens of KV that each decoding sequence read, `seconds` what it took until `ended_s`."""
        tokens = sum(end - start for start, end in spans)
        pairs = sum(causal_pairs(start, end) for start, end in spans)
        row = (tokens, pairs, len(contexts), sum(contexts), round(seconds, 6))
        self._rows[bool(spans)].append(row)
        self._kept_s[bool(spans)] = ended_s
        self._numbers[bool(spans)] += 1

    def last(self, *, chunks: bool) -> worker_pb2.StepTime | None:
        """Return the last recorded step with prompt tokens, or without, as a load report has it."""
        if not self._rows[chunks]:
            return None
        tokens, pairs, sequences, context, seconds = self._rows[chunks][-1]
        return worker_pb2.StepTime(
            number=self._numbers[chunks],
            prompt_tokens=tokens,
            pairs=pairs,
            sequences=sequences,
            context_tokens=context,
            micros=min(round(seconds * 1e6), _MAX_MICROS),
        )

    def audit(self) -> dict[str, Any]:
        """Return the rows [prompt tokens, query-key pairs, sequences, context tokens, seconds], the
        oldest first of each kind; how many steps verified proposals; and the limits of a step."""
        return {
            "recent_steps": [*self._rows[0], *self._rows[1]],
            "verifying_steps": self._verifying,
            "step_limits": self._limits,
        }
