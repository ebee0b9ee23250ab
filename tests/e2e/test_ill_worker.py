"""A real worker all of whose steps fail ends by itself. Its clients get their tokens elsewhere,
no other worker restarts, and its next start is another worker to everyone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from chaos.cluster import Cluster
from tests.support.request_load import RequestLoad

pytestmark = pytest.mark.timeout(240)

SETTINGS = ("router.placement=disaggregated", "step.chunk_tokens=64")
UNHEALTHY_EXIT = 70  # as deploy/host/restarts.py has it


@pytest.mark.nightly
async def test_a_worker_whose_steps_all_fail_is_replaced_without_loss(
    make_cluster: Callable[..., Cluster],
    make_load: Callable[..., RequestLoad],
    compare: Callable[..., list[str]],
    failing: tuple[str, ...],
) -> None:
    name = "decode-0"
    load = make_load(10, seed=31)
    for body in load.bodies:
        body |= {"stream": True, "max_tokens": max(24, body["max_tokens"])}
        body.pop("stop", None)
    cluster = make_cluster(*SETTINGS)
    cluster.start(1, 2, command=failing)
    expected = await load.run(cluster.url, concurrency=5)
    others = {other: cluster.pid(other) for other in cluster.names() if other != name}
    before = cluster.records()[name].boot_id
    running = asyncio.create_task(load.run(cluster.url, concurrency=5))
    # The worker has to be in the middle of several answers when its steps begin to fail.
    await asyncio.sleep(0.3)
    ill = cluster.folder / f"ill-{name}"
    ill.touch()
    began = time.monotonic()
    assert await asyncio.to_thread(cluster.wait_end, name) == UNHEALTHY_EXIT
    assert time.monotonic() - began < 30
    log = (cluster.folder / f"{name}.log").read_text()
    assert "illegal memory access" in log and "no step or probe has succeeded for 10 s" in log
    assert not compare(await running, expected)
    ill.unlink()
    cluster.restart(name)
    assert cluster.records()[name].boot_id != before
    assert {other: cluster.pid(other) for other in others if cluster.alive(other)} == others
    assert not compare(await load.run(cluster.url, concurrency=5), expected)
    cluster.quiet(within_s=5.0)
