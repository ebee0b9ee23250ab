"""Sums over ranks: threads of this process stand for the ranks' processes, as no code can tell."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton.engine.ranks.shared_allreduce import BUFFER_BYTES, SharedAllReduce
from baton.engine.ranks.shared_memory import SharedMemory
from baton.runtime.errors import DeviceLost
from tests.support.machine_speed import slowness

Ends = list[SharedAllReduce]


def ends_of(ranks: int, **how: float) -> Ends:
    memory = SharedMemory.create(SharedAllReduce.memory_bytes(ranks))
    memories = [SharedMemory(memory.descriptor, memory.size_bytes) for _ in range(ranks)]
    os.close(memory.descriptor)
    return [SharedAllReduce(each, ranks, rank, **how) for rank, each in enumerate(memories)]


def on_all(ends: Ends, work: Callable[[SharedAllReduce, int], torch.Tensor]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(ends)) as pool:
        return list(pool.map(work, ends, range(len(ends))))


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, BUFFER_BYTES // 4 + 5)])
def test_sums_are_added_in_the_order_of_the_ranks(
    ranks: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    given = [numbers(rank, shape, dtype) for rank in range(ranks)]
    expected = given[0].float()
    for other in given[1:]:
        expected = expected + other.float()
    found = on_all(ends_of(ranks), lambda end, rank: end(given[rank].clone()))
    assert all(torch.equal(each, expected.to(dtype)) for each in found)


def test_many_rounds_never_mix() -> None:
    def work(end: SharedAllReduce, rank: int) -> torch.Tensor:
        return torch.stack([end(torch.full((5,), float(rank + step))) for step in range(300)])

    expected = torch.stack([torch.full((5,), 3.0 * step + 3.0) for step in range(300)])
    assert all(torch.equal(each, expected) for each in on_all(ends_of(3), work))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite_stay_so(dtype: torch.dtype) -> None:
    given = torch.tensor([float("nan"), float("inf"), 1.0], dtype=dtype)
    for found in on_all(ends_of(2), lambda end, _: end(given.clone())):
        assert found[0].isnan() and found[1].isinf() and found[2] == 2.0


def test_a_missing_rank_is_named() -> None:
    here, _ = ends_of(2, timeout_s=0.05)
    with pytest.raises(DeviceLost, match="rank 1 did not take part in a sum over 2 ranks"):
        here(torch.zeros(3))


def test_after_a_lost_rank_no_sum_waits() -> None:
    here, _ = ends_of(2, timeout_s=0.5 * slowness())
    for _ in range(2):
        begun_s = time.monotonic()
        with pytest.raises(DeviceLost, match="rank 1 did not take part"):
            here(torch.zeros(3))
    assert time.monotonic() - begun_s < 0.3 * slowness()


def test_a_long_wait_asks_whether_the_others_live() -> None:
    here, _ = ends_of(2)

    def ended() -> None:
        raise DeviceLost("rank 1 ended")

    here.watch(ended)
    with pytest.raises(DeviceLost, match="rank 1 ended"):
        here.meet()


@pytest.mark.parametrize("goes_on", [True, False])
def test_the_wait_of_each_round_counts_for_itself(goes_on: bool) -> None:
    """Compiled code that runs many rounds returns in each of them, since the other rank is slow.
    All rounds together take longer than the limit. One of them cannot: it waits for two calls, and
    each counts 0.1 s at most, however late it is."""
    here, _ = ends_of(2, timeout_s=0.25)
    calls = 0

    def run(first: int) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        # A step of a rank takes this long.
        time.sleep(0.01)
        done = calls // 3 if goes_on else 0
        return (2, done) if calls < 30 else (0, 10)

    if goes_on:
        here.take_rounds(10, run)
        assert calls == 30
    else:
        with pytest.raises(DeviceLost, match="rank 1"):
            here.take_rounds(10, run)
