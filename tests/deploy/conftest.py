"""Fixtures of the deploy tests: a private runtime folder, and an instance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.deploy.host.instance import Instance, Job, JobStatus, processes_of, read_status
from baton.deploy.serve.process_launcher import spawn_supervisors

WAIT_S = 60.0


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
