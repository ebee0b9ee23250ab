"""An EAGLE-3 head that proposes for its target, from KV and features in the same blocks.

    target's pass    features of each row ─▶ its slot; KV of the head of a chunk's rows (`follow`)
    next step        KV of accepted proposals, now of the target's features (missing)
    (`run`)          pass 0: t, by the features of the token before it   ──▶ q1, drawn for p + 1
                     pass 1: q1, by the hidden state of pass 0           ──▶ q2, drawn for p + 2
                     ...       the target then verifies t, q1, q2, ...

The features of a token lie in its own slot of the blocks. So they are there after a prefix hit, a
handoff and a fork, and a head that was left behind catches up in any later step. Knows no request;
the device thread alone calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.decoder import Decoder
from baton.engine.model.eagle3_head import FIRST_SLOT, Eagle3Head
from baton.engine.model.step_layout import Bounds, StepLayout, lay_out
from baton.engine.sampling.draw_plan import Sampler
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.speculation.pending_draft import PendingDraft, draw_proposals


class FeatureDecoder:
    """A target's decoder that keeps the features of all rows that it computes, in `pool`, the
    head's group. `layers`: those whose inputs the head reads."""

    def __init__(
        self, decoder: Decoder, head: Eagle3Head, pool: KvPool, layers: tuple[int, ...]
    ) -> None:
        self._decoder, self._head, self._layers = decoder, head, layers
        assert pool.features is not None
        self._features = pool.features

    def hidden(self, layout: StepLayout) -> Tensor:
        """Same as `Decoder.hidden`."""
        hidden, states = self._decoder.hidden_and_states(layout, self._layers)
        found = self._head.features(states)
        self._features[layout.write_blocks, layout.write_slots] = found
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Same as `Decoder.logits`."""
        return self._decoder.logits(hidden)

    def shortened(self) -> Decoder:
        """Same as `Decoder.shortened`."""
        return self._decoder.shortened()


class Eagle3Drafter:
    """`pool` is the head's group of the target's pool, on the host; `bounds` are the target's."""

    def __init__(self, head: Eagle3Head, pool: KvPool, bounds: Bounds, sampler: Sampler) -> None:
        self.head, self._sampler, self._bounds = head, sampler, bounds
        assert pool.features is not None
        self._features = pool.features

    def run(self, slices: Sequence[Slice]) -> dict[int, tuple[int, ...]]:
        """Return the proposals of each slice that wants some, by its index; a draft ends early
        where logits are not finite. Raises EngineError if a slice breaks its bounds."""
        missing: list[Slice] = []
        drafts: dict[int, PendingDraft] = {}
        for index, item in enumerate(slices):
            if item.draft is None or not item.draft.tokens:
                continue
            wanted = item.draft.tokens if item.start >= FIRST_SLOT else 0
            single = Slice(item.tokens, item.start, item.blocks)
            drafts[index] = PendingDraft(item.draws, wanted, single)
            if earlier := tuple(item.draft.missing):
                missing.append(Slice(earlier, item.start - len(earlier), item.blocks))
        self._store(missing)
        self._propose([draft for draft in drafts.values() if not draft.ended])
        return {index: tuple(draft.proposed) for index, draft in drafts.items()}

    def follow(self, slices: Sequence[Slice]) -> None:
        """Write the KV of the slices with draft work and no proposals, once the target has
        computed them."""
        self._store(
            [
                Slice((*work.missing, *item.tokens), item.start - len(work.missing), item.blocks)
                for item in slices
                if (work := item.draft) is not None and not work.tokens
            ]
        )

    def _propose(self, live: list[PendingDraft]) -> None:
        """Draw proposals in passes of one row for each draft, in their order."""
        features: Tensor | None = None  # of the next pass, but the first
        while live:
            layout = lay_out(StepBatch(tuple(draft.slice for draft in live)), self._bounds)
            hidden = self.head.hidden(layout, self.stored(layout) if features is None else features)
            draw_proposals(live, self.head.logits(hidden), self._sampler)
            features = hidden[[place for place, draft in enumerate(live) if not draft.ended]]
            live = [draft for draft in live if not draft.ended]

    def _store(self, slices: Sequence[Slice]) -> None:
        if slices:
            layout = lay_out(StepBatch(tuple(slices)), self._bounds)
            self.head.store(layout, self.stored(layout))

    def stored(self, layout: StepLayout) -> Tensor:
        """Return the features [rows, hidden] of the token before each row; zeros at slot 0."""
        size, decodes = self._bounds.block_size, layout.decode_rows
        before = (layout.positions - 1).clamp(min=0)
        columns, blocks = before // size, torch.empty_like(before)
        if decodes:
            tables, own = layout.decode_tables.long(), columns[:decodes, None]
            blocks[:decodes] = tables.gather(1, own)[:, 0]
        for chunk in layout.chunks:
            rows = slice(chunk.first, chunk.end)
            blocks[rows] = chunk.blocks[columns[rows]]
        found = self._features[blocks, before % size]
        return found.masked_fill((layout.positions < FIRST_SLOT)[:, None], 0)
