"""The draws of an eager step on a device: made there by the kernels of a graph, whatever they ask.

So a draw is the same whether its step is a graph or not, which depends on what else is in the step.
Keeps no state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.sampling.draw_adjustments import Adjustments
from baton.engine.sampling.draw_logprobs import LogprobRoom, logprob_counts, with_logprobs
from baton.engine.sampling.draw_plan import DrawPlan
from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.scheduling.batch import Drawn
from baton.engine.triton.adjust import adjust_logits, find_logprobs
from baton.engine.triton.sampling import draw_tokens


def sample_on_device(logits: Tensor, plan: DrawPlan) -> list[Drawn]:
    """One for each draw of `plan`, of finite float32 `logits` [drawing, vocab], which may be
    overwritten."""
    rows, draws, device = plan.logit_rows(logits), plan.draws, logits.device
    if not draws:
        return []
    if plan.kinds.adjusted:
        adjust_logits(rows, Adjustments.of(draws).to(device))
    tokens = torch.empty(len(draws), dtype=torch.int64, device=device)
    finite = torch.empty(len(draws), dtype=torch.int8, device=device)
    draw_tokens(rows, DrawRules.of(draws).to(device), tokens, finite)
    counts = logprob_counts(draws, rows.shape[1])
    room = LogprobRoom.on(device, len(draws) if plan.kinds.told else 0)
    if plan.kinds.told:
        find_logprobs(rows, tokens, torch.tensor(counts, device=device), room)
        room = room.to(torch.device("cpu"))
    drawn = zip(draws, tokens.tolist(), counts, strict=True)
    return [with_logprobs(*each, row, room) for row, each in enumerate(drawn)]
