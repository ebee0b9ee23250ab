"""Captured graphs of decode steps: two for each bucket of batch sizes, over fixed memory.

    host: fill ──▶ staging (pinned) ──copy──▶ inputs ──▶ graph: decoder ──▶ logits
                                                ▲                             │
    host: masks of grammars, awaited now ──copy─┼─────▶ graph: draw ◀─────────┘
                                                └── tokens drawn ──┤
    host: tokens ◀── results (pinned) ◀────────────────copy────────┘

A step uses the smallest captured bucket that holds it; the other rows are padding, which only
writes into the pool's spare block. Penalties, biases, masks and logprobs are only copied for rows
that have them. Masks are computed while the step's own decoder runs, and awaited before its draw is
queued. Steps run on one stream in order, so the inputs may be refilled while the previous step
still runs. The graphs own their buffers; one thread uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.engine.execution.graph_device import DeviceEvent, GraphDevice, Replay
from baton.engine.model.decoder import Decoder
from baton.engine.model.step_layout import StepLayout
from baton.engine.sampling.draw_adjustments import Adjustments, max_entries
from baton.engine.sampling.draw_logprobs import (
    LOGPROB_COLUMNS,
    LogprobBuffers,
    drawn_with_logprobs,
    logprob_counts,
)
from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.sampling.mask_words import MaskWords, words_of
from baton.engine.scheduling.batch import Draw, Drawn

BUCKETS: tuple[int, ...] = (1, 2, 4, 8, *range(16, 257, 8))
STAGINGS = 3  # a step runs, the next is queued, and one more is being filled
# Rows of the packed inputs: integers, then floats by their bits.
_TOKEN, _FEED, _POSITION, _BLOCK, _SLOT, _LENGTH, _TOP_K, _START, _DRAW_POSITION = range(9)
_INVERSE, _TOP_P, _LOG_MIN_P = range(9, 12)
_LOGPROBS = 12  # how many, as `logprob_counts` has them
_BOUNDS, _PENALTIES = slice(13, 17), slice(17, 20)  # of `Adjustments`
_FIELDS = 20
ENTRIES = 1 << 20  # of penalties and biases in a step: 8 MiB a staging, and on the device


@dataclass(frozen=True, slots=True)
class DrawKernels:
    """The draw kernels of a device, in order of use, each for all rows: [rows, vocab] float32."""

    adjust: Callable[[Tensor, Adjustments], None]  # in place
    draw: Callable[[Tensor, DrawRules, Tensor, Tensor, MaskWords], None]
    find_logprobs: Callable[[Tensor, Tensor, Tensor, LogprobBuffers], None]


@dataclass(frozen=True, slots=True)
class GraphStep:
    """A step that runs on the device. Its results may be read after waiting for `done`."""

    rows: int
    started: DeviceEvent
    done: DeviceEvent
    results: Tensor  # int64 [2, rows]: tokens, and whether the logits were finite
    logprobs: LogprobBuffers
    logprob_counts: list[int]

    def drawn(self, row: int, draw: Draw, token: int) -> Drawn:
        """Return the draw of a row with its logprobs, after `wait`."""
        return drawn_with_logprobs(draw, token, self.logprob_counts[row], row, self.logprobs)

    def wait(self) -> tuple[list[int], list[bool], float]:
        """Return tokens, whether the logits of each were finite, and the device time in seconds."""
        self.done.wait()
        tokens, finite = self.results[:, : self.rows].tolist()
        return tokens, [bool(good) for good in finite], self.done.seconds_since(self.started)


def largest_bucket(max_rows: int) -> int:
    """Return the bucket that holds `max_rows`, or the largest."""
    return next((bucket for bucket in BUCKETS if bucket >= max_rows), BUCKETS[-1])


def rows_layout(tokens: Tensor, inputs: Tensor, tables: Tensor) -> StepLayout:
    """Return the layout of decode rows, a token each, as a graph reads it. `inputs`, int64
    [4, rows], are the positions, the written blocks and slots, and the lengths."""
    positions, blocks, slots, lengths = inputs
    return StepLayout(
        tokens=tokens,
        positions=positions,
        write_blocks=blocks,
        write_slots=slots,
        decode_tables=tables,
        decode_lengths=lengths.to(torch.int32),
        chunks=(),
        spans=(),
    )


def copy_tables(flat: Tensor, moved: Tensor, tables: Tensor, rows: int, width: int) -> None:
    """Queue the copy of `rows` block tables of `width` from the host's `flat` into wider ones.
    They pass through `moved`: a full device has no memory for a temporary."""
    count = rows * width
    moved[:count].copy_(flat[:count], non_blocking=True)
    tables[:rows, :width].copy_(moved[:count].view(rows, width))


class Followers(Protocol):
    """Other ranks, which capture and replay the same decoder steps; their collective operations
    meet this rank's."""

    def capture(self, bucket: int) -> None: ...

    def replay(self, bucket: int, layout: StepLayout) -> None: ...


class DecodeGraphs:
    """The captured graphs. Call `capture` before use; batches must fit into a captured bucket."""

    def __init__(
        self,
        decoder: Decoder,
        device: GraphDevice,
        kernels: DrawKernels,
        *,
        vocab_size: int,
        spare_block: int,
        max_rows: int,
        table_width: int,
        entries: int = ENTRIES,
        followers: Followers | None = None,
    ) -> None:
        """`table_width` in blocks, of the longest sequence; `entries` of a step's adjustments."""
        self._followers = followers
        self._decoder, self._device, self._kernels = decoder, device, kernels
        self._spare = spare_block
        self._rows = largest_bucket(max_rows)
        where = device.torch_device
        self._inputs = torch.zeros((_FIELDS, self._rows), dtype=torch.int64, device=where)
        self._tables = torch.zeros((self._rows, table_width), dtype=torch.int32, device=where)
        self._moved = torch.zeros(self._rows * table_width, dtype=torch.int32, device=where)
        self._results = torch.zeros((2, self._rows), dtype=torch.int64, device=where)
        self._entries = entries
        self._tokens = torch.zeros(entries, dtype=torch.int32, device=where)
        self._amounts = torch.zeros(entries, dtype=torch.float32, device=where)
        self._logprobs = LogprobBuffers.on(where, self._rows)
        self._stagings = [
            _Staging(device, self._rows, table_width, spare_block, entries, words_of(vocab_size))
            for _ in range(STAGINGS)
        ]
        self._vocab = vocab_size
        words = (self._rows, words_of(vocab_size))
        self._masks = MaskWords(
            torch.full((self._rows,), -1, dtype=torch.int32, device=where),
            torch.zeros(words, dtype=torch.int32, device=where),
        )
        self._masked = False  # whether a row of the device's `_masks` has one
        self._logits: Tensor | None = None  # of the decoder that ran last
        self._next_staging = 0
        self._sent = np.zeros((0, 0), dtype=np.int32)  # block tables that the device holds
        self._replays: dict[int, tuple[Replay, Replay]] = {}  # decoder, draw

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(sorted(self._replays))

    @torch.inference_mode()
    def capture(self, buckets: Sequence[int] = BUCKETS) -> None:
        """Capture the largest bucket first, so that the others share its memory."""
        for bucket in sorted((b for b in buckets if b <= self._rows), reverse=True):
            self._send(self._stagings[0].pad(0, bucket), bucket, self._padding(bucket))
            if self._followers is not None:
                self._followers.capture(bucket)
            decode = self._device.capture(partial(self._decode, bucket))
            # The logits are held until here: the next graphs may reuse their memory.
            draw = self._device.capture(partial(self._draw, bucket))
            self._replays[bucket] = decode, draw
            self._logits = None

    def bucket(self, rows: int) -> int | None:
        """Return the smallest captured bucket of at least `rows`; None if there is none."""
        return next((bucket for bucket in self.buckets if bucket >= rows), None)

    def holds(self, draws: Sequence[Draw]) -> bool:
        """Return whether the adjustments of these draws fit into the buffers."""
        return max_entries(draws) <= self._entries

    @torch.inference_mode()
    def start(
        self,
        layout: StepLayout,
        draws: Sequence[Draw | None],
        feeds: Sequence[int | None],
        fed_draws: Callable[[], Sequence[Draw | None]] | None = None,
    ) -> GraphStep:
        """Queue a step of decode rows for which `bucket` returns a graph. `feeds[r]`: the row of
        the previously started step whose token row r continues with; the history of its draw lacks
        that token. `fed_draws` waits for these tokens and returns the draws whose masks know them;
        it is called while the decoder runs, if a draw has a mask. `holds` is True for the draws."""
        rows = layout.decode_rows
        bucket = self.bucket(rows)
        assert bucket is not None and not layout.chunks
        staging = self._stagings[self._next_staging]
        self._next_staging = (self._next_staging + 1) % STAGINGS
        if staging.used is not None:
            staging.used.wait()  # three steps ago: usually ended
        counts = logprob_counts(draws, self._vocab)
        staging.fill(layout, draws, feeds, counts)
        tables = np.full((bucket, layout.decode_tables.shape[1]), self._spare, dtype=np.int32)
        tables[:rows] = layout.decode_tables.numpy()
        started = self._device.record_event()
        self._send(staging.pad(rows, bucket), bucket, tables)
        decode, draw = self._replays[bucket]
        if self._followers is not None:
            self._followers.replay(bucket, layout)
        decode()
        if any(each is not None and each.allowed is not None for each in draws):
            staging.used = self._device.record_event()  # were a mask to fail, this holds
            self._send_masks(staging.mask(fed_draws() if fed_draws else draws, self._vocab))
        elif self._masked:
            self._masks.rows.fill_(-1)
            self._masked = False
        draw()
        staging.results.copy_(self._results, non_blocking=True)
        if max(counts, default=-1) >= 0:
            staging.logprobs.copy_from(self._logprobs)
        staging.used = self._device.record_event()
        return GraphStep(rows, started, staging.used, staging.results, staging.logprobs, counts)

    def replay(self, bucket: int) -> None:
        """Queue a captured bucket again on its current inputs, for benchmarks."""
        for replay in self._replays[bucket]:
            replay()

    def _send_masks(self, masks: MaskWords) -> None:
        count, rows = len(masks.words), len(masks.rows)
        self._masks.words[:count].copy_(masks.words, non_blocking=True)
        self._masks.rows[:rows].copy_(masks.rows, non_blocking=True)
        self._masked = True

    def _send(self, staging: _Staging, bucket: int, tables: np.ndarray) -> None:
        self._inputs.copy_(staging.inputs, non_blocking=True)
        if count := staging.entries:
            self._tokens[:count].copy_(staging.tokens[0, :count], non_blocking=True)
            self._amounts[:count].copy_(staging.amounts[0, :count], non_blocking=True)
        if not np.array_equal(tables, self._sent):
            width = tables.shape[1]
            staging.tables[0, : bucket * width].numpy()[:] = tables.ravel()
            copy_tables(staging.tables[0], self._moved, self._tables, bucket, width)
            self._sent = tables

    def _padding(self, bucket: int) -> np.ndarray:
        return np.full((bucket, 1), self._spare, dtype=np.int32)

    def _fed_tokens(self, rows: int) -> Tensor:
        """Return the last drawn token that each row continues with; -1: none."""
        feed = self._inputs[_FEED, :rows]
        carried = self._results[0].index_select(0, feed.clamp(min=0))
        return torch.where(feed >= 0, carried, -1)

    def _decode(self, rows: int) -> None:
        """The decoder's captured work. Reads inputs, tables and the last drawn tokens."""
        inputs, fed = self._inputs[:, :rows], self._fed_tokens(rows)
        tokens = torch.where(fed >= 0, fed, inputs[_TOKEN])
        layout = rows_layout(tokens, inputs[_POSITION : _LENGTH + 1], self._tables[:rows])
        self._logits = self._decoder.logits(self._decoder.hidden(layout))

    def _draw(self, rows: int) -> None:
        """The draw's captured work. Reads inputs, masks and logits; writes results, over the last
        drawn tokens."""
        inputs, (drawn, finite) = self._inputs[:, :rows], self._results[:, :rows]
        logits = self._logits
        assert logits is not None
        real = inputs.view(torch.float64)
        rules = DrawRules(
            inverse_temperature=real[_INVERSE],
            top_k=inputs[_TOP_K],
            top_p=real[_TOP_P],
            log_min_p=real[_LOG_MIN_P],
            start=inputs[_START],
            position=inputs[_DRAW_POSITION],
        )
        adjustments = Adjustments(
            bounds=inputs[_BOUNDS],
            penalties=real[_PENALTIES],
            pending_token=self._fed_tokens(rows),
            tokens=self._tokens,
            amounts=self._amounts,
        )
        masks = MaskWords(self._masks.rows[:rows], self._masks.words)
        self._kernels.adjust(logits, adjustments)
        self._kernels.draw(logits, rules, drawn, finite, masks)
        self._kernels.find_logprobs(logits, drawn, inputs[_LOGPROBS], self._logprobs)


class _Staging:
    """One step's inputs and results on the host."""

    def __init__(
        self,
        device: GraphDevice,
        rows: int,
        width: int,
        spare_block: int,
        entries: int,
        mask_words: int,
    ) -> None:
        self.inputs = device.host_buffer(_FIELDS, rows, torch.int64)
        self.tables = device.host_buffer(1, rows * width, torch.int32)
        self.results = device.host_buffer(2, rows, torch.int64)
        self.tokens = device.host_buffer(1, entries, torch.int32)
        self.amounts = device.host_buffer(1, entries, torch.float32)
        self.entries = 0  # of these, in this step
        self._mask_rows = device.host_buffer(1, rows, torch.int32)
        self._mask_words = device.host_buffer(rows, mask_words, torch.int32)
        self.logprobs = LogprobBuffers(
            device.host_buffer(rows, LOGPROB_COLUMNS, torch.int32),
            device.host_buffer(rows, LOGPROB_COLUMNS, torch.float32),
        )
        self.used: DeviceEvent | None = None
        self._ints = self.inputs.numpy()
        self._reals = self._ints.view(np.float64)
        self._spare = spare_block

    def fill(
        self,
        layout: StepLayout,
        draws: Sequence[Draw | None],
        feeds: Sequence[int | None],
        logprobs: Sequence[int],
    ) -> None:
        rows = layout.decode_rows
        ints, rules = self._ints, DrawRules.of(draws)
        ints[_TOKEN, :rows] = layout.tokens.numpy()
        ints[_FEED, :rows] = [-1 if feed is None else feed for feed in feeds]
        ints[_POSITION, :rows] = layout.positions.numpy()
        ints[_BLOCK, :rows] = layout.write_blocks.numpy()
        ints[_SLOT, :rows] = layout.write_slots.numpy()
        ints[_LENGTH, :rows] = layout.decode_lengths.numpy()
        ints[_TOP_K, :rows] = rules.top_k.numpy()
        ints[_START, :rows] = rules.start.numpy()
        ints[_DRAW_POSITION, :rows] = rules.position.numpy()
        self._reals[_INVERSE, :rows] = rules.inverse_temperature.numpy()
        self._reals[_TOP_P, :rows] = rules.top_p.numpy()
        self._reals[_LOG_MIN_P, :rows] = rules.log_min_p.numpy()
        ints[_LOGPROBS, :rows] = logprobs
        adjustments = Adjustments.of(draws, (self.tokens[0], self.amounts[0]))
        ints[_BOUNDS, :rows] = adjustments.bounds.numpy()
        self._reals[_PENALTIES, :rows] = adjustments.penalties.numpy()
        self.entries = len(adjustments.tokens)

    def mask(self, draws: Sequence[Draw | None], vocab: int) -> MaskWords:
        """Wait for the masks of `draws`, and return them in pinned memory; other rows have none."""
        self._mask_rows.fill_(-1)
        made = MaskWords.of(draws, vocab, (self._mask_rows[0], self._mask_words))
        return MaskWords(self._mask_rows[0], made.words)

    def pad(self, rows: int, bucket: int) -> _Staging:
        """Fill the rows from `rows` on with one token in the spare block, drawn greedily."""
        self._ints[:, rows:bucket] = 0
        self._ints[_FEED, rows:bucket] = -1
        self._ints[_BLOCK, rows:bucket] = self._spare
        self._ints[_LENGTH, rows:bucket] = 1
        self._reals[_TOP_P, rows:bucket] = 1.0
        self._reals[_LOG_MIN_P, rows:bucket] = -np.inf
        self._ints[_LOGPROBS, rows:bucket] = -1
        self._reals[_PENALTIES, rows:bucket] = [[1.0], [0.0], [0.0]]
        return self
