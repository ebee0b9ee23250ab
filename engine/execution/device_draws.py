"""The draws of an eager step on a device, by the same kernels as the graphs.

A draw is thus the same whether its step runs as a graph or eagerly, which depends on the batch.
Keeps no state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.sampling.draw_adjustments import Adjustments
from baton.engine.sampling.draw_logprobs import LogprobBuffers, drawn_with_logprobs, logprob_counts
from baton.engine.sampling.draw_plan import DrawPlan
from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.sampling.mask_words import MaskWords
from baton.engine.scheduling.batch import Drawn
from baton.engine.triton.adjust import adjust_logits, find_logprobs
from baton.engine.triton.sampling import draw_tokens


def sample_on_device(logits: Tensor, plan: DrawPlan) -> list[Drawn]:
    """Draw one token for each draw of `plan` from finite float32 `logits` [drawing, vocab], which
    may be overwritten."""
    rows, draws, device = plan.logit_rows(logits), plan.draws, logits.device
    if not draws:
        return []
    if plan.groups.adjusted:
        adjust_logits(rows, Adjustments.of(draws).to(device))
    tokens = torch.empty(len(draws), dtype=torch.int64, device=device)
    finite = torch.empty(len(draws), dtype=torch.int8, device=device)
    masks = MaskWords.of(draws, rows.shape[1]).to(device) if plan.groups.masked else None
    draw_tokens(rows, DrawRules.of(draws).to(device), tokens, finite, masks)
    counts = logprob_counts(draws, rows.shape[1])
    buffers = LogprobBuffers.on(device, len(draws) if plan.groups.with_logprobs else 0)
    if plan.groups.with_logprobs:
        find_logprobs(rows, tokens, torch.tensor(counts, device=device), buffers)
        buffers = buffers.to(torch.device("cpu"))
    drawn = zip(draws, tokens.tolist(), counts, strict=True)
    return [drawn_with_logprobs(*each, row, buffers) for row, each in enumerate(drawn)]
