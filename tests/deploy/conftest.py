"""Fixtures of the deploy tests: a private runtime folder, an instance, and `baton serve`
over stand-in jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.deploy.control import control_metrics
from baton.deploy.host.instance import (
    Instance,
    Job,
    JobStatus,
    live_instances,
    processes_of,
    read_status,
)
from baton.deploy.serve.process_launcher import spawn_supervisors
from tests.support.stand_in_serve import StandInServe, write_stand_in_model

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def no_recommendation() -> Iterator[None]:
    """A role controller recommends nothing before its first forecast, as every process begins."""
    control_metrics.RECOMMENDED_WORKERS.clear()
    yield
    control_metrics.RECOMMENDED_WORKERS.clear()


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], bool]:
    """Polls a condition; False once WAIT_S are over."""

    def wait(condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    return wait


@pytest.fixture(autouse=True)
def runtime_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def instance() -> Iterator[Instance]:
    claimed = Instance.claim("test")
    claimed.write_environment({})
    yield claimed
    claimed.end()
    assert processes_of(claimed.instance_id) == []


@pytest.fixture
def start(
    instance: Instance, wait_for: Callable[[Callable[[], bool]], bool]
) -> Callable[[Job], JobStatus]:
    """Starts a job's supervisor, and returns the first status that the supervisor writes."""

    def start(job: Job) -> JobStatus:
        instance.write_job(job)
        spawn_supervisors(instance.folder, [job.name])
        assert wait_for(lambda: read_status(instance.folder, job.name) is not None)
        found = read_status(instance.folder, job.name)
        assert found is not None
        return found

    return start


@pytest.fixture
def stand_in_model(tmp_path: Path) -> Path:
    folder = tmp_path / "stand-in"
    write_stand_in_model(folder)
    return folder


@pytest.fixture
def serving(stand_in_model: Path, runtime_folder: Path) -> Iterator[Callable[..., StandInServe]]:
    """Starts `baton serve` over stand-in jobs; at the end none may be left."""
    started: list[StandInServe] = []

    def start(
        launcher: str = "process", *rest: str, port: int = 0, fault: str = ""
    ) -> StandInServe:
        started.append(StandInServe(stand_in_model, launcher, *rest, port=port, fault=fault))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
            served.process.communicate(timeout=60)
    assert live_instances() == []
