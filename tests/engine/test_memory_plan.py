from __future__ import annotations

import pytest

from baton.engine.memory.memory_plan import MemoryPlan, _size


def plan(**changes):
    usual = {
        "weights_bytes": 890 << 20,
        "free_bytes": 20 << 30,
        "fraction": 0.5,
        "blocks": 5851,
        "block_bytes": 1_835_008,
        "block_size": 16,
        "max_context": 32768,
        "kv": "bfloat16",
    }
    return MemoryPlan(**usual | changes)


def test_the_sums() -> None:
    found = plan()
    assert found.pool_bytes == 5851 * 1_835_008
    assert found.tokens == 93_616
    assert (found.sequences, found.sequence_tokens) == (22, 4096)


def test_a_sequence_is_not_longer_than_the_model_serves() -> None:
    found = plan(max_context=100, blocks=15)
    assert (found.sequences, found.sequence_tokens) == (2, 100)  # 7 blocks each


def test_the_line_shows_all_of_it() -> None:
    assert plan().line() == (
        "weights 890 MiB; free 20 GiB x 0.5: pool 10 GiB (bfloat16) = 5,851 blocks of 1.75 MiB = "
        "93,616 tokens = 22 sequences of 4,096"
    )
    assert "free 20 GiB, blocks as set: pool" in plan(fraction=0.0).line()


def test_what_a_gpu_needs_beside_the_pool_is_shown() -> None:
    found = plan(beside_bytes=3 << 29, fraction=0.9)
    assert "free (20 GiB - 1.5 GiB of buffers, graphs and a step) x 0.9: pool" in found.line()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1 << 30, "1 GiB"),
        (5 << 50, "5.12e+03 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert _size(count) == text
