"""A small model that proposes for a large one, from its own KV in the same blocks.

    slice: tokens [t], start p          pass 0: what is missing, then t   ──▶ q1, drawn for p + 1
                                        pass 1: q1                        ──▶ q2, drawn for p + 2
                                        ...       the target then verifies t, q1, q2, ...

Each proposal is a draw by the rules, the history and the noise of the target's own draw at that
position: two models that agree on a distribution then agree on the token. So the output does not
depend on this model. The last proposal's own KV is not computed here; where it is accepted, the
next slice names it as missing. Knows no request; the device thread alone calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.decoder import Decoder
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.sampling.draw_plan import Sampler
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import ModelSpec
from baton.engine.speculation.pending_draft import PendingDraft, draw_proposals


class DraftModel:
    """`pool` is the draft's group of the target's pool, `max_context` the target's."""

    def __init__(
        self, spec: ModelSpec, decoder: Decoder, pool: KvPool, max_context: int, sampler: Sampler
    ) -> None:
        self.spec = spec
        self._decoder, self._pool, self._sampler = decoder, pool, sampler
        self._bounds = Bounds(pool.blocks, pool.block_size, spec.vocab_size, max_context)

    def run(self, slices: Sequence[Slice]) -> dict[int, tuple[int, ...]]:
        """Compute the KV that slices ask for, and return the proposals of each that wants some, by
        its index. A draft ends early where logits are not finite. Raises EngineError, before
        anything is written, if a slice breaks its bounds."""
        computed: list[Slice] = []
        drafts: dict[int, PendingDraft] = {}
        for index, item in enumerate(slices):
            if item.draft is None:
                continue
            missing, wanted = item.draft.missing, item.draft.tokens
            tokens = (*missing, *item.tokens)
            whole = Slice(tokens, item.start - len(missing), item.blocks)
            if wanted:
                drafts[index] = PendingDraft(item.draws, wanted, whole)
            else:
                computed.append(whole)
        live = list(drafts.values())
        while live or computed:
            self._pass(live, computed)
            live, computed = [draft for draft in live if not draft.ended], []
        return {index: tuple(draft.proposed) for index, draft in drafts.items()}

    def follow(self, slices: Sequence[Slice]) -> None:
        """Compute nothing after the target: `run` has computed all that slices ask for."""

    def _pass(self, drafts: Sequence[PendingDraft], computed: Sequence[Slice]) -> None:
        """Compute the slices of both and draw a token for each draft; one whose logits are not
        finite has ended."""
        slices = (*(draft.slice for draft in drafts), *computed)
        layout = lay_out(StepBatch(slices), self._bounds)
        device = self._pool.tensor.device
        hidden = self._decoder.hidden(layout if device.type == "cpu" else layout.to(device))
        if not drafts:
            return
        rows = [layout.spans[place][1] - 1 for place in range(len(drafts))]
        draw_proposals(drafts, self._decoder.logits(hidden[rows]), self._sampler)
