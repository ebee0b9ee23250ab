"""An EAGLE-3 head that proposes for its target, from KV and features in the same blocks.

    target's pass    features of each row ─▶ its slot; KV of the head of a chunk's rows (`follow`)
    next step        KV of accepted proposals, now of the target's features (missing)
    (`run`)          pass 0: t, by the features of the token before it   ──▶ q1, drawn for p + 1
                     pass 1: q1, by the hidden state of pass 0           ──▶ q2, drawn for p + 2
                     ...       the target then verifies t, q1, q2, ...

The features of a token lie in its own slot of the blocks. So they are there after a prefix hit, a
handoff and a fork, and a head that was left behind catches up in any later step. Knows no request;
the device thread alone calls it.

A head that does not fit its target is refused at start-up, by name: a head that is computed as an
EAGLE head is accepted at no position, without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from baton.engine.checkpoint.eagle3_weights import fused_columns
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.eagle3_head import FIRST_SLOT, Eagle3Head
from baton.engine.model.step_layout import Bounds, StepLayout, lay_out
from baton.engine.sampling.draw_plan import Sampler
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.config_fields import read_fields
from baton.engine.spec.eagle3_spec import STATES, Eagle3Spec, head_kind, read_eagle3_spec
from baton.engine.spec.model_spec import ModelSpec
from baton.engine.speculation.pending_draft import PendingDraft, draw_proposals
from baton.runtime.errors import ModelError


@runtime_checkable
class StateDecoder(Protocol):
    """A target's decoder that shows its states: `Decoder`, or several ranks' ones."""

    def hidden(self, layout: StepLayout) -> Tensor: ...

    def hidden_and_states(
        self, layout: StepLayout, before: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def shortened(self) -> StateDecoder: ...


class FeatureDecoder:
    """A target's decoder that keeps the features of all rows that it computes, in `pool`, the
    head's group. `layers`: those whose inputs the head reads."""

    def __init__(
        self, decoder: StateDecoder, head: Eagle3Head, pool: KvPool, layers: tuple[int, ...]
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

    def shortened(self) -> StateDecoder:
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
            features = hidden[[index for index, draft in enumerate(live) if not draft.ended]]
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


def head_spec_for(target: ModelSpec, folder: Path, context: int) -> Eagle3Spec:
    """Read the EAGLE-3 head of `folder` and check that it fits `target`. Raises ModelError, naming
    each difference with both values."""
    kind = head_kind(read_fields(folder / "config.json"))
    columns = fused_columns(folder)
    if kind == "none" and not columns:
        raise ModelError(
            f"{folder} holds no EAGLE-3 head: config.json names none, and no file has fc.weight; "
            "speculate by draft=FOLDER if it is a draft model"
        )
    if kind == "eagle" or columns == 2 * target.hidden_size:
        raise ModelError(
            f"{folder} holds an EAGLE head, whose fc reads {columns} numbers of a token; an "
            f"EAGLE-3 head reads {STATES * target.hidden_size} of this model: give one of those"
        )
    spec = read_eagle3_spec(folder, context)
    wrong = _differences(spec, target, columns)
    if wrong:
        raise ModelError(
            f"the EAGLE-3 head in {folder} does not fit the model: {'; '.join(wrong)}; give a "
            "head that was trained for this model"
        )
    return spec


def refuse_head(folder: Path) -> None:
    """Raise ModelError for a folder that holds a head, where a draft model is expected."""
    kind = head_kind(read_fields(folder / "config.json"))
    if kind == "none" and not fused_columns(folder):
        return
    named = {"eagle": "an EAGLE head", "eagle3": "an EAGLE-3 head", "none": "a head"}[kind]
    raise ModelError(
        f"{folder} holds {named}, which is no draft model; speculate by eagle3=FOLDER where it is "
        "an EAGLE-3 head"
    )


def _differences(spec: Eagle3Spec, target: ModelSpec, columns: int) -> list[str]:
    wrong = []
    if spec.layer.vocab_size != target.vocab_size:
        wrong.append(f"its vocabulary has {spec.layer.vocab_size} tokens, not {target.vocab_size}")
    if spec.target_hidden_size != target.hidden_size:
        wrong.append(
            f"its target's hidden size is {spec.target_hidden_size}, not {target.hidden_size}"
        )
    elif columns != STATES * target.hidden_size:
        wrong.append(
            f"its fc reads {columns} numbers of a token, not {STATES} x {target.hidden_size}"
        )
    layers = spec.layers_of(target.layers)
    if len(set(layers)) != STATES or min(layers) < 0 or max(layers) > target.layers:
        wrong.append(f"it reads the layers {list(layers)} of a model of {target.layers} layers")
    return wrong
