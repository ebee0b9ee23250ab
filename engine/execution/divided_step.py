"""A step that does not fit into the device's memory, run in parts.

Halves, and their halves, down to single slices; one that does not fit alone fails alone. To run
a slice twice is harmless: it writes the same KV into the same blocks, and a draw keeps no
state. Knows the ways in which torch, numpy and CUDA say that memory is short; keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.engine.scheduling.batch import StepBatch, StepResult
from baton.runtime.errors import OutOfMemory

Run = Callable[[StepBatch], StepResult]
# What a RuntimeError says in torch's allocators, in C++ below it, and in CUDA's libraries.
_PHRASES = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")
_STATUSES = ("ALLOC_FAILED",)


def run_divided(run: Run, batch: StepBatch) -> StepResult:
    """`run(batch)`, in parts where memory is short. Other errors are raised as they are, also
    from a part: then the whole step has failed."""
    reason = ""
    try:
        return run(batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
    # Only here is the error gone, and with it the tensors that its frames held.
    torch.cuda.empty_cache()  # of no effect where CUDA is not in use
    if len(batch.slices) == 1:
        tokens = len(batch.slices[0].tokens)
        lack = OutOfMemory(f"a slice of {tokens} tokens does not fit into memory: {reason}")
        return StepResult(((),), failed={0: lack}, shortages=1)
    half = len(batch.slices) // 2
    first = run_divided(run, StepBatch(batch.slices[:half]))
    return _joined(first, half, run_divided(run, StepBatch(batch.slices[half:])))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be had: the host's or the device's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        any(phrase in text.lower() for phrase in _PHRASES)
        or any(status in text for status in _STATUSES)
    )


def _joined(first: StepResult, count: int, second: StepResult) -> StepResult:
    """One result of the two parts of a step that did not fit; the first has `count` slices."""
    return StepResult(
        first.drawn + second.drawn,
        first.device_s + second.device_s,
        first.broken | {count + index for index in second.broken},
        {**first.failed, **{count + index: error for index, error in second.failed.items()}},
        1 + first.shortages + second.shortages,
        {**first.scores, **{count + index: scores for index, scores in second.scores.items()}},
    )
