"""The leader's decoder, whose calls all ranks carry out together.

    hidden(layout)   command ─▶ all ranks compute ─▶ the same hidden states on each
    logits(rows)     command ─▶ each rank its own tokens ─▶ LogitsBoard ─▶ the leader reads all

A step runner uses it like any decoder. An error in the middle of a command leaves the ranks out of
step, so the worker then ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.model.step_layout import StepLayout
from baton.engine.ranks.layout_arrays import to_arrays
from baton.engine.ranks.rank_group import RankGroup, in_step
from baton.engine.ranks.rank_message import Command
from baton.engine.ranks.rank_parts import RankParts
from baton.engine.ranks.rank_process import put_logits


class LeadingDecoder:
    """The decoder of all ranks, of the worker's model or of its draft model. Only the device thread
    calls it."""

    def __init__(self, parts: RankParts, group: RankGroup) -> None:
        """Connect the ranks to compute the worker's model."""
        self._parts, self._group = parts, group
        self._own = parts.decoder
        self._hidden, self._logits = Command.HIDDEN, Command.LOGITS
        self._first: list[NDArray[np.int64]] = []  # arrays of a command, before the layout

    def hidden(self, layout: StepLayout) -> Tensor:
        """Same as `Decoder.hidden`. Raises DeviceLost if a rank does not respond, and EngineError
        for a layout that is too large, before anything is computed."""
        self._group.send(self._hidden, [*self._first, *to_arrays(layout)])
        return in_step(lambda: self._own.hidden(layout))

    def hidden_and_states(
        self, layout: StepLayout, before: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Same as `Decoder.hidden_and_states`. Raises like `hidden`."""
        self._group.send(self._hidden, to_arrays(layout))
        return in_step(lambda: self._own.hidden_and_states(layout, before))

    def logits(self, hidden: Tensor) -> Tensor:
        """Same as `Decoder.logits`. Raises like `hidden`."""
        step = self._parts.board.rows
        parts = [
            self._some_logits(hidden[start : start + step]) for start in range(0, len(hidden), step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def shortened(self) -> LeadingDecoder:
        """Same as `Decoder.shortened`, on all ranks, with as many layers as the leader's share
        needs: another rank's experts may be of other kinds."""
        short = copy(self)
        short._own, short._hidden = self._own.shortened(), Command.HIDDEN_SHORTENED
        short._first = [np.array([short._own.layers])]
        return short

    def of_draft(self) -> LeadingDecoder:
        """Return the decoder of the draft model that is split over the ranks."""
        assert self._parts.draft is not None
        draft = copy(self)
        draft._own = self._parts.draft
        draft._hidden, draft._logits = Command.DRAFT_HIDDEN, Command.DRAFT_LOGITS
        return draft

    def _some_logits(self, rows: Tensor) -> Tensor:
        board, numbers = self._parts.board, rows.contiguous().view(_BITS[rows.dtype])
        self._group.send(self._logits, [numbers.numpy()])
        in_step(lambda: put_logits(self._own, board, numbers, rows.dtype))
        return board.take(len(rows))


_BITS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.uint16}
