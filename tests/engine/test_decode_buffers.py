"""The buffers of split decode: large enough for every batch, in one place, refused if too large."""

from __future__ import annotations

import pytest
import torch

from baton.engine.triton import decode_buffers
from baton.engine.triton.decode_buffers import DecodeBuffers, DecodeLimits, DecodeShape
from baton.runtime.errors import ConfigError

SHAPE = DecodeShape(programs=2, heads=6, dim=16, tile_tokens=64)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_buffers, "processors", lambda device: 132)


@pytest.mark.parametrize("tokens", [0, 256])
def test_there_is_room_for_the_splits_of_every_batch(tokens: int) -> None:
    limits = DecodeLimits(40, 3000, split_tokens=tokens)
    buffers = DecodeBuffers(limits, SHAPE, CPU)
    seen = set()
    for rows in range(1, limits.rows + 1):
        splits, partials = buffers.of(rows)
        assert partials.mixed.shape[:2] == (rows, 6)
        assert partials.mixed.shape[2] >= splits.capacity(limits.longest, 64)
        assert partials.mixed.is_contiguous() and partials.mixed.dtype == torch.float32
        assert partials.weights.shape == partials.mixed.shape[:3]
        seen.add(splits)
    assert len(seen) > 1
    assert {splits.tokens for splits in seen} == {tokens}


def test_rows_that_are_not_split_need_no_room() -> None:
    buffers = DecodeBuffers(DecodeLimits(4000, 3000), SHAPE, CPU)
    splits, partials = buffers.of(4000)
    assert splits.direct
    assert partials.mixed.numel() == partials.weights.numel() == 0


def test_memory_stays_where_it_is() -> None:
    """A captured graph goes on using it."""
    buffers = DecodeBuffers(DecodeLimits(8, 1000), SHAPE, CPU)
    addresses = {buffers.of(rows)[1].mixed.data_ptr() for rows in (1, 8, 3)}
    assert len(addresses) == 1


def test_the_same_number_of_rows_is_cut_alike() -> None:
    """Whatever the rows' lengths are: a captured step does not know them."""
    buffers = DecodeBuffers(DecodeLimits(8, 100_000), SHAPE, CPU)
    assert buffers.of(4)[0] == buffers.of(4)[0]
    assert buffers.of(1)[0].programs > buffers.of(8)[0].programs


def test_fixed_splits_are_the_same_for_every_batch() -> None:
    buffers = DecodeBuffers(DecodeLimits(30, 9000, split_tokens=512), SHAPE, CPU)
    assert {buffers.of(rows)[0].tokens for rows in range(1, 31)} == {512}


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*shape, **how):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ConfigError, match=r"partial results of 8 rows of 1000 tokens need \d+ b"):
        DecodeBuffers(DecodeLimits(8, 1000), SHAPE, CPU)
