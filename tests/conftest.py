"""What tests of several folders share: a real OTLP collector in this process, a fair watch, and
programs in processes of their own."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from baton.runtime.silence import Silence
from baton.runtime.telemetry import tracing
from tests.support.file_order import begin_with_longest
from tests.support.machine_speed import slowness
from tests.support.trace_collector import ListeningCollector, collecting

# The same examples in each run, and slow machines are no failures. Others are looked for with
# `pytest --hypothesis-profile=search`.
PATIENT: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("search", **PATIENT)
settings.register_profile("baton", **PATIENT, derandomize=True)
settings.load_profile("baton")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    begin_with_longest(items)
    if slowness() > 1.0:
        usual_s = float(config.getini("timeout"))
        for item in items:
            mark = item.get_closest_marker("timeout")
            limit_s = mark.args[0] if mark else usual_s
            item.add_marker(pytest.mark.timeout(limit_s * slowness()), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay until the end: to look for garbage among them takes a second of each
    process of pytest."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep what was imported out of every later collection of garbage: it stays until the end, and
    to walk it takes a large part of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def collector() -> Iterator[ListeningCollector]:
    """The collector, and the address that it listens on. This process's exporter ends with it."""
    with collecting() as made:
        yield made
        tracing.shutdown()


@pytest.fixture(scope="module")
def shared_collector() -> Iterator[ListeningCollector]:
    """As `collector`, for what the tests of a module look at together."""
    with collecting() as made:
        yield made


@asynccontextmanager
async def watch() -> AsyncIterator[Callable[[], float]]:
    silence = Silence(float("inf"))

    async def keep() -> None:
        while True:
            await silence.sleep(0.01)

    keeping = asyncio.create_task(keep())
    try:
        yield silence.so_far_s
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@pytest.fixture
def fair_watch() -> Callable[[], AbstractAsyncContextManager[Callable[[], float]]]:
    """`async with fair_watch() as so_far_s`: the seconds in which this process had its turn. What
    its sleeps are late by, on a machine that others use too, does not count."""
    return watch


@pytest.fixture(scope="session")
def ipv6() -> None:
    """Skips where there is no loopback of IPv6, as in many containers."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError as error:
        pytest.skip(f"no loopback of IPv6 here: {error}")


def run_alone(program: str | Path, *arguments: object, within_s: float = 110) -> str:
    way = [program] if isinstance(program, Path) else ["-c", program]
    done = subprocess.run(
        [sys.executable, "-P", *way, *map(str, arguments)],
        env=os.environ | {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"},
        capture_output=True,
        text=True,
        timeout=within_s * slowness(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def own_process() -> Callable[..., str]:
    """`own_process(program, *arguments)`: what a Python program, a text or a file, prints in a
    process of its own. In this one the threads and the garbage of other tests take and free memory
    at any time, so nothing is counted here."""
    return run_alone
