"""Real processes (chaos/cluster.py starts them), loads for them, and what comes back."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from chaos.cluster import Cluster
from tests.support.kept_cluster import KeptCluster
from tests.support.machine_speed import slowness, timers
from tests.support.plain_http import NO_AUTHORITIES
from tests.support.request_load import Choices, RequestLoad, differences
from tests.support.waiting import eventually, wait_until

HERE = Path(__file__).parent

CORRUPTING = (sys.executable, "-P", str(HERE / "corrupting_worker.py"))
UNDER_WAY = (
    "router.placement=disaggregated",
    *timers(lease_s=1.0),
    "step.chunk_tokens=64",  # long prompts take many steps, so that a fault finds them under way
    "step.prefill_tokens=64",
)
PATIENT = (sys.executable, "-P", str(HERE / "patient_worker.py"), f"{slowness():.1f}")
FAILING = (sys.executable, "-P", str(HERE / "failing_worker.py"))


@pytest.fixture(scope="session")
def compare() -> Callable[..., list[str]]:
    return differences


@pytest.fixture(scope="session")
def corrupting() -> tuple[str, ...]:
    """The command of a worker whose mover spoils blocks."""
    return CORRUPTING


@pytest.fixture(scope="session")
def patient() -> tuple[str, ...]:
    """The command of a worker that waits longer for its ranks on slow machines."""
    return PATIENT


@pytest.fixture(scope="session")
def failing() -> tuple[str, ...]:
    """The command of a worker whose steps fail once it is ill (failing_worker.py)."""
    return FAILING


@pytest.fixture(scope="session")
def make_load() -> Callable[..., RequestLoad]:
    return RequestLoad


@pytest.fixture(scope="session")
def make_streams(make_load: Callable[..., RequestLoad]) -> Callable[..., RequestLoad]:
    """`make_streams(count, seed=...)`: streams that nothing ends before their tokens are out."""

    def make(count: int, *, seed: int) -> RequestLoad:
        made = make_load(count, seed=seed)
        for body in made.bodies:
            body["stream"] = True
            body["max_tokens"] = max(24, body["max_tokens"])
            body.pop("stop", None)
        return made

    return make


@pytest.fixture(scope="module")
def expected(load: RequestLoad, alone: Cluster) -> list[Choices]:
    """The right answers to a module's own `load`."""
    return asyncio.run(load.run(alone.url, concurrency=8))


@pytest.fixture(scope="session")
def until() -> Callable[..., Awaitable[None]]:
    """`await until(happens)`: looks in a thread, and fails if it never does."""

    async def wait(happens: Callable[[], bool], within_s: float | None = None) -> None:
        await eventually(
            lambda: asyncio.to_thread(happens), within_s, show=lambda: inspect.getsource(happens)
        )

    return wait


@contextmanager
def clusters(folders: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(*settings: str) -> Cluster:
        cluster = Cluster(folders.mktemp("cluster"), settings)
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        cluster.close()
        print(cluster.logs())


@pytest.fixture
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Clusters of one test; they end with it, and their logs are shown if it failed."""
    with clusters(tmp_path_factory) as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Cluster]]:
    """As `make_cluster`, for what the tests of a module look at together."""
    with clusters(tmp_path_factory) as make:
        yield make


@pytest.fixture
def make_busy(make_cluster: Callable[..., Cluster]) -> Callable[..., Cluster]:
    """Clusters whose prompts take many steps, and whose leases are short."""
    return lambda *settings: make_cluster(*UNDER_WAY, *settings)


@pytest.fixture(scope="module")
def kept_busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., KeptCluster]]:
    """`kept_busy(*settings)`: such a fleet, made as `make_busy` makes one."""
    made: list[KeptCluster] = []

    def make(*settings: str) -> KeptCluster:
        def cluster() -> Cluster:
            return Cluster(tmp_path_factory.mktemp("kept"), (*UNDER_WAY, *settings))

        made.append(KeptCluster(cluster))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker for all tests that leave them whole."""
    settings = ("router.placement=disaggregated", "router.grpc_port=0")
    cluster = Cluster(tmp_path_factory.mktemp("pair"), settings)
    try:
        yield cluster.start(1, 1)
    finally:
        cluster.close()


@pytest.fixture
def all_freed(pair: Cluster) -> Callable[[], None]:
    """`all_freed()`: until nothing is left of a request whose client has left. Its router may send
    it on before it hears of that, and so to a worker that was at rest."""

    def wait() -> None:
        wait_until(lambda: pair.audit("decode-0")["requests"] == 0, 1.0 * slowness())
        pair.quiet(within_s=1.0)

    return wait


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One process without disaggregation: what every answer is held against."""
    cluster = Cluster(tmp_path_factory.mktemp("alone"), ("router.placement=local",))
    try:
        yield cluster.start(0, 1)
    finally:
        cluster.close()


@pytest.fixture
async def client(pair: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=pair.url, timeout=60 * slowness(), verify=NO_AUTHORITIES
    ) as made:
        yield made
