"""Fixtures of the deploy tests: a private runtime folder, an instance, and `baton serve`
over stand-in jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.deploy.host.instance import (
    Instance,
    Job,
    JobStatus,
    live_instances,
    processes_of,
    read_status,
)
from baton.deploy.serve.process_launcher import spawn_supervisors
from baton.planner.control import control_metrics
from tests.support.stand_in_serve import StandInServe, write_stand_in_model
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def no_recommendation() -> Iterator[None]:
    """A role controller recommends nothing before its first forecast, as every process begins."""
    control_metrics.RECOMMENDED_WORKERS.clear()
    yield
    control_metrics.RECOMMENDED_WORKERS.clear()


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
def start(instance: Instance) -> Callable[[Job], JobStatus]:
    """Starts a job's supervisor, and returns the first status that the supervisor writes."""

    def start(job: Job) -> JobStatus:
        instance.write_job(job)
        spawn_supervisors(instance.folder, [job.name])
        wait_until(lambda: read_status(instance.folder, job.name) is not None)
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
