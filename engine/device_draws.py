"""The draws of an eager step on a device: made there, as in a graph, where rules say all of them.

So a draw is the same whether its step is a graph or not, which depends on what else is in the
step. Penalties, bias and logprobs are the request's own: those draws are the CPU's in every
step. Keeps no state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.batch import Drawn
from baton.engine.draw_plan import DrawPlan
from baton.engine.draw_rules import DrawRules, drawable
from baton.engine.sampling import sample
from baton.engine.triton_sampling import draw_tokens


def draw_on_device(logits: Tensor, plan: DrawPlan) -> list[Drawn]:
    """One for each draw of `plan`, of finite float32 `logits` [drawing, vocab]."""
    rows, draws = plan.logit_rows(logits), plan.draws
    here = [row for row, draw in enumerate(draws) if drawable(draw)]
    others = [row for row, draw in enumerate(draws) if not drawable(draw)]
    found: dict[int, Drawn] = {}
    if here:
        tokens = torch.empty(len(here), dtype=torch.int64, device=rows.device)
        finite = torch.empty(len(here), dtype=torch.int8, device=rows.device)
        rules = DrawRules.of([draws[row] for row in here]).to(rows.device)
        draw_tokens(rows if not others else rows[here], rules, tokens, finite)
        drawn = zip(here, tokens.tolist(), strict=True)
        found |= {row: Drawn(draws[row].choice, token) for row, token in drawn}
    if others:
        made = sample(rows[others].cpu(), [draws[row] for row in others])
        found |= dict(zip(others, made, strict=True))
    return [found[row] for row in range(len(draws))]
