"""The progress of a fleet on many nodes, and when its start has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.deploy.host import job_log
from baton.deploy.host.fleet_progress import (
    WorkerProgress,
    check_start,
    read_fleet_progress,
    write_fleet_progress,
)
from baton.deploy.host.instance import PROGRESS_KEY
from baton.deploy.nodes.fleet_process import FleetStart
from baton.runtime.errors import ConfigError, Unavailable

READY = WorkerProgress("prefill-0", "10.0.0.1", "", "10.0.0.1:9", "2 GB of KV")
LOADING = WorkerProgress("decode-0", "10.0.0.2", "loading weights: 40 %", log="one\ntwo")
WAITING = WorkerProgress("decode-1", text="no node has room for it (CPU 1)")
FAILED = WorkerProgress("decode-2", "10.0.0.3", "BATON_TOKEN is not set", given_up=True)


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an instance whose supervisor has named a file to this process."""
    monkeypatch.setenv(PROGRESS_KEY, str(tmp_path / "fleet.progress"))
    return tmp_path


def test_lines_name_the_worker_and_its_node() -> None:
    assert READY.lines() == ["prefill-0 ready at 10.0.0.1:9", "prefill-0 memory: 2 GB of KV"]
    assert LOADING.lines() == ["decode-0 on 10.0.0.2: loading weights: 40 %"]
    assert WAITING.lines() == ["decode-1: no node has room for it (CPU 1)"]


def test_a_start_fails_by_a_worker_that_is_given_up_or_late() -> None:
    check_start([READY, LOADING, WAITING], overdue=False)
    check_start([READY], overdue=True)
    with pytest.raises(ConfigError) as given_up:
        check_start([READY, LOADING, FAILED], overdue=False)
    assert str(given_up.value) == "decode-2 on 10.0.0.3 is not ready: BATON_TOKEN is not set."
    with pytest.raises(Unavailable) as late:
        check_start([READY, LOADING, WAITING], overdue=True)
    assert str(late.value).splitlines()[:4] == [
        "decode-0 on 10.0.0.2 is not ready: loading weights: 40 %. The end of its log:",
        "one",
        "two",
        "decode-1 is not ready: no node has room for it (CPU 1).",
    ]


def test_what_a_driver_writes_is_read_by_its_instance(named: Path) -> None:
    assert read_fleet_progress(named, "fleet") == []
    write_fleet_progress([READY, LOADING, WAITING, FAILED])
    assert read_fleet_progress(named, "fleet") == [READY, LOADING, WAITING, FAILED]


def test_a_full_disk_ends_no_fleet(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = FleetStart(0.0)
    monkeypatch.setenv(PROGRESS_KEY, str(named / "no folder" / "fleet.progress"))
    start.look((LOADING,))
    monkeypatch.setenv(PROGRESS_KEY, str(named / "fleet.progress"))
    start.look((LOADING,))
    assert read_fleet_progress(named, "fleet") == [LOADING]


def test_a_fleet_without_a_limit_waits_for_its_workers() -> None:
    FleetStart(0.0).look((READY, LOADING, FAILED))


def test_a_fleet_with_a_limit_fails_until_it_was_ready() -> None:
    late = FleetStart(1e-9)
    with pytest.raises(Unavailable, match=r"decode-0 on 10\.0\.0\.2 is not ready"):
        late.look((READY, LOADING))
    with pytest.raises(Unavailable, match="no worker is known"):
        late.look(())
    in_time = FleetStart(60.0)
    in_time.look(())
    with pytest.raises(ConfigError, match="BATON_TOKEN is not set"):
        in_time.look((READY, FAILED))
    in_time.look((READY,))
    in_time.look((READY, FAILED))


def test_the_end_of_a_log_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    assert "No such file" in job_log.log_end(tmp_path, "decode-0")
    log.write_text("".join(f"line {number}\n" for number in range(10_000)))
    lines = job_log.log_end(tmp_path, "decode-0").splitlines()
    assert lines == [f"line {number}" for number in range(10_000 - job_log.END_LINES, 10_000)]
    log.write_bytes(b"\xff" * 100_000)
    assert len(job_log.log_end(tmp_path, "decode-0")) == job_log.END_BYTES
