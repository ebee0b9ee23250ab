"""The in-flight window holds both limits and never blocks for good."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_transfer.fetch_ledger import Window


def test_both_limits_hold() -> None:
    window = Window(max_reads=2, max_bytes=100)
    window.started(40)
    assert window.admits(60) and not window.admits(61)
    window.started(60)
    assert not window.admits(0)
    window.ended(60)
    assert window.admits(60)


def test_a_lone_large_read_goes() -> None:
    window = Window(4, 100)
    assert window.admits(1000)
    window.started(1000)
    assert not window.admits(1)
    window.ended(1000)
    assert (window.reads, window.bytes) == (0, 0)


def test_misuse_is_refused() -> None:
    window = Window(1, 10)
    with pytest.raises(ValueError, match="in flight"):
        window.ended(1)
    window.started(5)
    with pytest.raises(ValueError, match="outside"):
        window.started(5)
    with pytest.raises(ValueError, match="in flight"):
        window.ended(6)
    with pytest.raises(ValueError, match="empty"):
        Window(0, 1)


@given(st.integers(1, 5), st.integers(1, 100), st.lists(st.integers(1, 150), max_size=50))
def test_everything_goes_through_in_the_end(reads: int, limit: int, sizes: list[int]) -> None:
    window, flying = Window(reads, limit), []
    for size in sizes:
        while not window.admits(size):
            window.ended(flying.pop(0))
        window.started(size)
        flying.append(size)
        assert len(flying) == window.reads <= reads
        assert sum(flying) == window.bytes and (window.bytes <= limit or len(flying) == 1)
