"""The division of a step that does not fit into device memory.

A step is halved down to single slices; one that verifies proposals then runs without them, and a
slice that does not fit alone fails alone. A slice may run twice: it writes the same KV into the
same blocks, and a draw keeps no state. Recognises the out-of-memory errors of torch, numpy and
CUDA. Keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from baton.engine.scheduling.batch import StepBatch, StepResult
from baton.engine.scheduling.verification import speculates, without_proposals
from baton.runtime.errors import OutOfMemory

Run = Callable[[StepBatch], StepResult]
# RuntimeError texts of torch's allocators, of C++ below them, and of CUDA's libraries.
_PHRASES = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")
_STATUSES = ("ALLOC_FAILED",)


def run_divided(run: Run, batch: StepBatch) -> StepResult:
    """Run `batch`, in parts if memory runs out. Other errors, also of a part, are raised unchanged:
    then the complete step has failed."""
    reason = ""
    try:
        return run(batch)
    except Exception as error:
        # Each device raises a class of its own when memory runs out; any other error is raised
        # again.
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
    # The error and the tensors that its frames held are released only here.
    torch.cuda.empty_cache()  # no effect without CUDA
    if len(batch.slices) == 1 and speculates(batch.slices[0]):
        found = run_divided(run, StepBatch((without_proposals(batch.slices[0]),)))
        return replace(found, shortages=1 + found.shortages)
    if len(batch.slices) == 1:
        tokens = len(batch.slices[0].tokens)
        lack = OutOfMemory(f"a slice of {tokens} tokens does not fit into memory: {reason}")
        return StepResult(((),), failed={0: lack}, shortages=1)
    half = len(batch.slices) // 2
    first = run_divided(run, StepBatch(batch.slices[:half]))
    return _joined(first, half, run_divided(run, StepBatch(batch.slices[half:])))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` reports that host or device memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        any(phrase in text.lower() for phrase in _PHRASES)
        or any(status in text for status in _STATUSES)
    )


def _joined(first: StepResult, count: int, second: StepResult) -> StepResult:
    """Join the results of two parts of a step; the first has `count` slices."""
    return StepResult(
        first.drawn + second.drawn,
        first.device_s + second.device_s,
        first.broken | {count + index for index in second.broken},
        {**first.failed, **{count + index: error for index, error in second.failed.items()}},
        1 + first.shortages + second.shortages,
        {**first.scores, **{count + index: scores for index, scores in second.scores.items()}},
        {**first.proposed, **{count + index: found for index, found in second.proposed.items()}},
        first.draft_s + second.draft_s,
    )
