"""The captured decoder steps of a rank that follows the leader: `DecodeGraphs` without draws.

    command ──▶ staging (pinned) ──copy──▶ inputs, tables ──▶ graph: decoder, collective operations

Its collective operations meet those of the leader's graph of the same bucket, so both are captured
and replayed in the same order. One thread uses it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from baton.engine.execution.decode_graph import (
    STAGINGS,
    copy_tables,
    largest_bucket,
    rows_layout,
)
from baton.engine.execution.graph_device import DeviceEvent, GraphDevice, Replay
from baton.engine.model.decoder import Decoder
from baton.engine.model.step_layout import StepLayout

_POSITION, _BLOCK, _SLOT, _LENGTH = range(4)


class FollowingGraphs:
    """Graphs of a rank's decoder, one for each bucket that the leader has captured."""

    def __init__(
        self,
        decoder: Decoder,
        device: GraphDevice,
        *,
        spare_block: int,
        max_rows: int,
        table_width: int,
    ) -> None:
        """The arguments are those of the leader's `DecodeGraphs`."""
        self._decoder, self._device, self._spare = decoder, device, spare_block
        rows, where = largest_bucket(max_rows), device.torch_device
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=where)
        self._inputs = torch.zeros((4, rows), dtype=torch.int64, device=where)
        self._tables = torch.zeros((rows, table_width), dtype=torch.int32, device=where)
        self._moved = torch.zeros(rows * table_width, dtype=torch.int32, device=where)
        self._stagings = [_StepInputs(device, rows, table_width) for _ in range(STAGINGS)]
        self._next = 0
        self._replays: dict[int, Replay] = {}

    @torch.inference_mode()
    def capture(self, bucket: int) -> None:
        """Capture a step of `bucket` rows, together with the leader."""
        self._pad(self._stagings[0], 0, bucket, 1)
        self._send(self._stagings[0], bucket, 1)
        self._replays[bucket] = self._device.capture(partial(self._step, bucket))

    @torch.inference_mode()
    def replay(self, bucket: int, layout: StepLayout) -> None:
        """Queue a step of decode rows on the host's `layout`; the leader has the tokens."""
        staging = self._stagings[self._next]
        self._next = (self._next + 1) % STAGINGS
        if staging.used is not None:
            staging.used.wait()
        rows, width = layout.decode_rows, layout.decode_tables.shape[1]
        for field, given in (
            (_POSITION, layout.positions),
            (_BLOCK, layout.write_blocks),
            (_SLOT, layout.write_slots),
            (_LENGTH, layout.decode_lengths),
        ):
            staging.inputs[field, :rows] = given
        tables = staging.tables[0, : bucket * width].view(bucket, width)
        tables[:rows] = layout.decode_tables
        self._pad(staging, rows, bucket, width)
        self._send(staging, bucket, width)
        self._replays[bucket]()
        staging.used = self._device.record_event()

    def _pad(self, staging: _StepInputs, rows: int, bucket: int, width: int) -> None:
        """Fill the rows from `rows` on with one token in the spare block, as the leader does."""
        padding = staging.inputs[:, rows:bucket]
        padding.zero_()
        padding[_BLOCK], padding[_LENGTH] = self._spare, 1
        staging.tables[0, rows * width : bucket * width] = self._spare

    def _send(self, staging: _StepInputs, bucket: int, width: int) -> None:
        self._inputs.copy_(staging.inputs, non_blocking=True)
        copy_tables(staging.tables[0], self._moved, self._tables, bucket, width)

    def _step(self, rows: int) -> None:
        """The captured work."""
        layout = rows_layout(self._tokens[:rows], self._inputs[:, :rows], self._tables[:rows])
        self._decoder.logits(self._decoder.hidden(layout))


class _StepInputs:
    """One step's inputs on the host."""

    def __init__(self, device: GraphDevice, rows: int, width: int) -> None:
        self.inputs: Tensor = device.host_buffer(4, rows, torch.int64)
        self.tables: Tensor = device.host_buffer(1, rows * width, torch.int32)
        self.used: DeviceEvent | None = None
