"""What a request leaves is freed with its last holder: no cycle waits for Python's search, which
in a worker comes after hours. Outputs and messages hung on such cycles, some KB of each request."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType

import pytest

from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import Cluster

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def circular() -> Iterator[Callable[[], set[str]]]:
    """Names the kinds of our own objects, functions and methods that lie in cycles now."""

    def found() -> set[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        garbage, names = list(gc.garbage), set[str]()
        gc.garbage.clear()
        for thing in garbage:
            named = thing if isinstance(thing, FunctionType | MethodType) else type(thing)
            if (named.__module__ or "").startswith("baton."):
                names.add(named.__qualname__)
        return names

    gc.collect()
    gc.disable()
    yield found
    gc.enable()


async def test_the_search_finds_what_holds_itself(circular: Callable[[], set[str]]) -> None:
    class Ring:
        __module__ = "baton.here"

        def __init__(self) -> None:
            self.ring = self

    Ring()
    assert [name.rpartition(".")[2] for name in circular()] == ["Ring"]


@pytest.mark.parametrize("local", [False, True], ids=["handed over", "local"])
async def test_requests_leave_no_cycle(
    make_cluster: MakeCluster, circular: Callable[[], set[str]], local: bool
) -> None:
    cluster = make_cluster(patient=True)
    client = Client(cluster, "decode-0")
    for turn in range(3):
        request = client.submit(list(range(turn, 40)), n=2, max_tokens=6, local=local)
        await request.finished()
        assert request.tokens(1) == request.expected(1)
    del request
    await cluster.quiet()
    # Tasks of the request may need some more turns of the loop to end.
    await asyncio.sleep(0.1)
    assert circular() == set()


async def test_a_cancelled_request_leaves_no_cycle(
    make_cluster: MakeCluster, circular: Callable[[], set[str]]
) -> None:
    cluster = make_cluster(step_s=0.01, patient=True)
    client = Client(cluster, "decode-0")
    request = client.submit(list(range(60)), max_tokens=20)
    # The request has to be under way when it is cancelled.
    await asyncio.sleep(0.02)
    client.cancel(request)
    await request.finished()
    del request
    await cluster.quiet()
    # Tasks of the request may need some more turns of the loop to end.
    await asyncio.sleep(0.1)
    assert circular() == set()
