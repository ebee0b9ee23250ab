"""Log-probabilities of given tokens: those of a prompt.

Rows are processed in parts, so that the memory for logits does not grow with the chunk.
Knows no request. Keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.scheduling.batch import Scores, Scoring

_PART_LOGITS = 1 << 22  # in memory at once


def score(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, scoring: Scoring, vocab_size: int
) -> Scores | None:
    """Return the log-probability and rank of each target after its row of `hidden` [tokens,
    hidden], and the most likely tokens; `logits_of` returns float32 logits [rows, vocab]. Returns
    None if a logit is not finite."""
    found = Scores()
    step = max(1, _PART_LOGITS // vocab_size)
    for start in range(0, len(scoring.targets), step):
        targets = scoring.targets[start : start + step]
        logits = logits_of(hidden[start : start + len(targets)])
        if not bool(logits.sum(dim=-1).isfinite().all()):
            return None
        logprobs = logits.log_softmax(dim=-1)
        wanted = torch.tensor(targets, device=logits.device)[:, None]
        own = logprobs.gather(1, wanted)  # [rows, 1]
        best = logprobs.topk(min(scoring.top, vocab_size), dim=-1)
        found.logprobs += own[:, 0].tolist()
        found.ranks += (1 + (logprobs > own).sum(dim=-1)).tolist()
        found.top_tokens += best.indices.flatten().tolist()
        found.top_logprobs += best.values.flatten().tolist()
    return found
