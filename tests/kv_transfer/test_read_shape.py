"""The cuts of a READ between blocks of unlike sizes: every byte once, in as few as there are."""

from __future__ import annotations

import numpy as np
import pytest

from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.read_shape import read_shape
from baton.runtime.errors import ReadFailed

KNOWN = {
    (64, 64, 64): (1, 1, 1),  # alike: one descriptor a block
    (33, 64, 33): (1, 1, 1),  # narrowed into one of the granter's blocks
    (64, 33, 64): (2, 1, 2),  # widened into two
    (128, 33, 128): (4, 1, 4),
    (64, 64, 32): (1, 2, 2),
    (32, 32, 64): (1, 1, 1),
    (66, 33, 22): (2, 3, 4),
}


@pytest.mark.parametrize("sizes", KNOWN)
def test_each_byte_of_a_unit_lies_in_one_cut(sizes: tuple[int, int, int]) -> None:
    unit, granter, reader = sizes
    shape = read_shape(*sizes)
    assert (shape.granter_parts, shape.reader_parts, len(shape.cuts)) == KNOWN[sizes]
    theirs = np.zeros((shape.granter_parts, granter), dtype=int)
    ours = np.zeros((shape.reader_parts, reader), dtype=int)
    content = np.arange(1, unit + 1)
    theirs.ravel()[:unit] = content
    for cut in shape.cuts:
        moved = theirs[cut.granter_part, cut.granter_offset :][: cut.length]
        slice_ = ours[cut.reader_part, cut.reader_offset :][: cut.length]
        assert not slice_.any() and len(moved) == cut.length
        slice_[:] = moved
    assert (ours.ravel()[:unit] == content).all()


def test_descriptors_are_those_of_the_rows_of_a_cut() -> None:
    shape = read_shape(64, 33, 64)
    remote, local = np.array([7, 2, 5, 0], np.int32), np.array([3, 1], np.int32)
    assert shape.end(remote, 10, granter=True).tolist() == [7, 5, 12, 10]
    assert shape.end(local, 4, granter=False).tolist() == [3, 1, 7, 5]
    alike = read_shape(64, 64, 64)
    assert alike.end(remote, 10, granter=True) is remote  # and nothing is copied


def test_pools_of_unlike_sizes_need_a_unit() -> None:
    peer = PeerPool(b"P" * 16, "nixl", b"", 0, 64, 8)
    assert len(peer.shape(64).cuts) == 1
    with pytest.raises(ReadFailed, match="blocks of 64 bytes differ from the own 33"):
        peer.shape(33)
    with pytest.raises(ValueError, match="a unit of 0 bytes"):
        read_shape(0, 1, 1)
