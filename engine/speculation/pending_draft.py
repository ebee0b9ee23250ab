"""One sequence's proposals while they are drawn: of a draft model, or of an EAGLE-3 head.

Each proposal is a draw by the rules, the history and the noise of the target's own draw at that
position: two models that agree on a distribution then agree on the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from baton.engine.sampling.draw_plan import Sampler, one_draw_each
from baton.engine.scheduling.batch import Draw, Slice, extended


@dataclass(slots=True)
class PendingDraft:
    """A sequence's proposals so far, and the slice of its next pass."""

    draws: tuple[Draw, ...]  # of the target, for each proposal
    wanted: int
    slice: Slice
    proposed: list[int] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return len(self.proposed) >= self.wanted

    @property
    def draw(self) -> Draw:
        """The target's draw of the next proposal, without its logprobs."""
        draw = extended(self.draws[len(self.proposed)], self.proposed)
        if draw.params.top_logprobs is None:
            return draw
        return replace(draw, params=replace(draw.params, top_logprobs=None))

    def add(self, token: int) -> None:
        self.proposed.append(token)
        end = self.slice.start + len(self.slice.tokens)
        self.slice = Slice((token,), end, self.slice.blocks)


def draw_proposals(drafts: Sequence[PendingDraft], logits: Tensor, sampler: Sampler) -> None:
    """Draw a token for each draft from its row of `logits`; one whose row is not finite ends."""
    finite = logits.sum(dim=-1).isfinite()
    drawing = []
    for draft, good in zip(drafts, finite.tolist(), strict=True):
        if good:
            drawing.append(draft)
        else:
            draft.wanted = 0
    if not drawing:
        return
    drawn = sampler(logits[finite], one_draw_each([draft.draw for draft in drawing]))
    for draft, found in zip(drawing, drawn, strict=True):
        draft.add(found.token)
