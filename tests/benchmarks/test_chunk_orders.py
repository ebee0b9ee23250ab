"""`python -m benchmarks.chunk_orders`: each order is what it says; the product's waits least."""

from __future__ import annotations

import pytest

from baton.decode_worker import scheduler as decode_scheduler
from baton.engine.scheduling.chunks import ChunkScheduler
from baton.planner.traces import TraceRequest
from baton.prefill_worker import scheduler as prefill_scheduler
from benchmarks.chunk_orders.__main__ import alone_s, figure, simulated, traffic
from benchmarks.fleets.chunk_orders import ORDERS, prompts_in_order
from tests.support.benchmark_runs import Measure


def ended(order: str, lengths: list[int]) -> list[int]:
    """Return the prompts in the order in which they end; all but the first arrive together."""
    scheduler: ChunkScheduler[int] = ORDERS[order](64, 64, 16)
    found: list[int] = []
    for number, tokens in enumerate(lengths):
        scheduler.add(number, tokens, 0)
    while chunks := scheduler.plan():
        for chunk in chunks:
            scheduler.commit(chunk)
            found += [chunk.key] * chunk.last
    return found


def test_each_order_ends_prompts_in_its_own_order() -> None:
    assert ended("first", [320, 160, 160]) == [0, 1, 2]
    assert ended("unaged", [320, 160, 160]) == [1, 2, 0]
    assert ended("shortest", [320, 160, 160]) == [1, 2, 0]
    assert ended("shared", [320, 160, 160]) == [1, 0, 2]  # the second waits half a step for it


def test_the_orders_of_the_product_come_back() -> None:
    with prompts_in_order("first"):
        for module in (prefill_scheduler, decode_scheduler):
            assert module.__dict__["ChunkScheduler"] is ORDERS["first"]
    for module in (prefill_scheduler, decode_scheduler):
        assert module.__dict__["ChunkScheduler"] is ChunkScheduler


@pytest.mark.parametrize("shape", traffic(1))
def test_prompts_wait_less_than_in_order_of_arrival(shape: str) -> None:
    requests = traffic(60)[shape]
    means = {order: figure(order, simulated(order, requests)).value for order in ORDERS}
    assert means["shortest"] < means["shared"] < means["first"]


def test_a_prompt_alone_takes_the_time_of_its_steps() -> None:
    (found,) = simulated("shortest", [TraceRequest(0.0, 1500, 4)])
    assert found.ttft_s == pytest.approx(alone_s(1500), rel=0.05)


def test_it_writes_its_figures(measured: Measure) -> None:
    _, figures, printed = measured("chunk_orders")
    assert len(figures) == 3 * len(ORDERS)
    assert "longest" in figures["simulated_mixed_shared"]["beside"]
    assert "simulated_bursts_shortest" in printed
