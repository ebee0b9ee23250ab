"""What the attention kernels share, where no kernel is needed. The walk itself is held by the
parity of `triton_prefill` and `triton_decode`."""

from __future__ import annotations

import pytest
import torch

from baton.engine.triton.tile import INTERPRETED, Tiles, options, power_of_two, precision


@pytest.mark.parametrize(
    ("count", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (96, 128), (128, 128), (129, 256)]
)
def test_power_of_two(count: int, expected: int) -> None:
    assert power_of_two(count) == expected


def test_float32_is_not_rounded_to_tf32() -> None:
    assert precision(torch.float32) == "ieee"
    assert precision(torch.bfloat16) != "ieee"


def test_a_launch_gets_its_settings() -> None:
    assert options(Tiles(128, 64, 8, 3)) == {"num_warps": 8, "num_stages": 3}


def test_this_process_does_not_interpret() -> None:
    """Else the other tests would compile nothing."""
    assert not INTERPRETED
