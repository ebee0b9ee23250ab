"""The leader's decoder, whose calls all ranks carry out together.

    hidden(layout)   command ─▶ all ranks compute ─▶ the same hidden states on each
    logits(rows)     command ─▶ each rank its own tokens ─▶ LogitsBoard ─▶ the leader reads all

A step runner uses it like any decoder. An error in the middle of a command leaves the ranks out of
step, so the worker then ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.model.decoder import Decoder
from baton.engine.model.step_layout import StepLayout
from baton.engine.ranks.layout_arrays import to_arrays
from baton.engine.ranks.rank_group import RankGroup, in_step
from baton.engine.ranks.rank_message import Command
from baton.engine.ranks.rank_parts import RankParts
from baton.engine.ranks.rank_process import put_logits


class LeadingDecoder:
    """The decoder of all ranks. Only the device thread calls it."""

    def __init__(self, parts: RankParts, group: RankGroup, *, shortened: bool = False) -> None:
        """Connect the ranks. `shortened`: compute the layers of `Decoder.shortened` only."""
        self._parts, self._group, self._board = parts, group, parts.board
        self._own: Decoder = parts.decoder.shortened() if shortened else parts.decoder
        self._hidden = Command.HIDDEN_SHORTENED if shortened else Command.HIDDEN

    def hidden(self, layout: StepLayout) -> Tensor:
        """Same as `Decoder.hidden`. Raises DeviceLost if a rank does not respond, and EngineError
        for a layout that is too large, before anything is computed."""
        self._group.send(self._hidden, to_arrays(layout))
        return in_step(lambda: self._own.hidden(layout))

    def logits(self, hidden: Tensor) -> Tensor:
        """Same as `Decoder.logits`. Raises like `hidden`."""
        step = self._board.rows
        parts = [
            self._some_logits(hidden[start : start + step]) for start in range(0, len(hidden), step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def shortened(self) -> LeadingDecoder:
        """Same as `Decoder.shortened`, on all ranks."""
        return LeadingDecoder(self._parts, self._group, shortened=True)

    def _some_logits(self, rows: Tensor) -> Tensor:
        numbers = rows.contiguous().view(_BITS[rows.dtype])
        self._group.send(Command.LOGITS, [numbers.numpy()])
        decoder = self._parts.decoder
        in_step(lambda: put_logits(decoder, self._board, numbers, rows.dtype))
        return self._board.take(len(rows))


_BITS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.uint16}
