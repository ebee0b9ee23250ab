from __future__ import annotations

import pytest

from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.runtime.errors import EngineError
from baton.runtime.sampling import SamplingParams

BOUNDS = Bounds(blocks=10, block_size=4, vocab_size=50, max_context=30)


def test_decodes_come_first_and_spans_lead_back() -> None:
    batch = StepBatch(
        (
            Slice([1, 2, 3, 4, 5], 3, [7, 2]),
            Slice([6], 8, [0, 1, 9, 4]),
            Slice([7, 8], 0, [5]),
            Slice([9], 0, [3]),
        )
    )
    layout = lay_out(batch, BOUNDS)
    assert layout.tokens.tolist() == [6, 9, 1, 2, 3, 4, 5, 7, 8]
    assert layout.positions.tolist() == [8, 0, 3, 4, 5, 6, 7, 0, 1]
    assert layout.write_blocks.tolist() == [9, 3, 7, 2, 2, 2, 2, 5, 5]
    assert layout.write_slots.tolist() == [0, 0, 3, 0, 1, 2, 3, 0, 1]
    assert layout.spans == ((2, 7), (0, 1), (7, 9), (1, 2))
    assert layout.decode_rows == 2
    assert layout.decode_lengths.tolist() == [9, 1]
    assert layout.decode_tables.tolist() == [[0, 1, 9], [3, 0, 0]]
    first, second = layout.chunks
    assert (first.first, first.end, first.start, first.blocks.tolist()) == (2, 7, 3, [7, 2])
    assert (second.first, second.end, second.start, second.blocks.tolist()) == (7, 9, 0, [5])


def test_only_chunks_or_only_decodes() -> None:
    assert lay_out(StepBatch((Slice([1, 2], 0, [0]),)), BOUNDS).decode_rows == 0
    assert lay_out(StepBatch((Slice([1], 0, [0]),)), BOUNDS).chunks == ()


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (Slice([], 0, [0]), "0 tokens"),
        (Slice([1], -1, [0]), "from position -1"),
        (Slice([1, 50], 0, [0]), "exceeds the vocabulary of 50"),
        (Slice([-1], 0, [0]), "exceeds the vocabulary of 50"),
        (Slice([1] * 5, 0, [0]), "1 blocks do not hold 5"),
        (Slice([1], 4, [0]), "1 blocks do not hold 5"),
        (Slice([1], 0, []), "0 blocks do not hold 1"),
        (Slice([1], 4, [0, 10]), "outside the pool of 10"),
        (Slice([1], 4, [-1, 0]), "outside the pool of 10"),
        (Slice([1], 30, list(range(10))), "31 tokens exceed 30"),
    ],
)
def test_a_slice_out_of_bounds_is_named(item: Slice, reason: str) -> None:
    with pytest.raises(EngineError, match=f"slice 1: .*{reason}"):
        lay_out(StepBatch((Slice([1], 0, [0]), item)), BOUNDS)


def test_an_empty_step_is_refused() -> None:
    with pytest.raises(EngineError, match="at least one slice"):
        lay_out(StepBatch(()), BOUNDS)


def test_blocks_beyond_those_in_use_are_not_looked_at() -> None:
    assert lay_out(StepBatch((Slice([1], 0, [0, 99]),)), BOUNDS).decode_tables.tolist() == [[0]]


def verifying(tokens, start, blocks):
    params = SamplingParams(temperature=0.0)
    draws = tuple(Draw(0, start + 1 + row, params) for row in range(len(tokens)))
    return Slice(tokens, start, blocks, draws, proposed=len(tokens) - 1)


def test_tokens_that_are_verified_are_decode_rows_of_one_table() -> None:
    batch = StepBatch(
        (
            Slice([1, 2], 0, [5]),
            Slice([6], 8, [0, 1, 9]),
            verifying([3, 4, 5], 6, [7, 2, 8]),
            Slice([9], 0, [3]),
        )
    )
    layout = lay_out(batch, BOUNDS)
    assert layout.tokens.tolist() == [6, 3, 4, 5, 9, 1, 2]
    assert layout.positions.tolist() == [8, 6, 7, 8, 0, 0, 1]
    assert layout.write_blocks.tolist() == [9, 2, 2, 8, 3, 5, 5]
    assert layout.spans == ((5, 7), (0, 1), (1, 4), (4, 5))
    assert layout.decode_lengths.tolist() == [9, 7, 8, 9, 1]
    assert layout.decode_tables.tolist() == [[0, 1, 9], [7, 2, 0], [7, 2, 0], [7, 2, 8], [3, 0, 0]]
    assert len(layout.chunks) == 1


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (verifying([1, 50], 0, [0]), "exceeds the vocabulary of 50"),
        (verifying([1, 2], 3, [0]), "1 blocks do not hold 5"),
        (verifying([1, 2], 29, list(range(10))), "31 tokens exceed 30"),
        (Slice([1, 2], 0, [0], proposed=1), "0 draws"),
    ],
)
def test_a_verified_slice_out_of_bounds_is_named(item: Slice, reason: str) -> None:
    with pytest.raises(EngineError, match=f"slice 1: .*{reason}"):
        lay_out(StepBatch((Slice([1], 0, [0]), item)), BOUNDS)
