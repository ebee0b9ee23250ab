"""`baton serve` with workers that Ray starts, on other nodes and on this host, also after Ray's
head is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.deploy.host.instance import processes_of, read_environment, read_status
from baton.runtime.registry import DirectoryRegistry
from tests.support.stand_in_serve import StandInServe
from tests.support.waiting import wait_until


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_TOKEN", "of the nodes")


@pytest.mark.usefixtures("token")
def test_progress_of_workers_on_other_nodes_is_shown(serving: Callable[..., StandInServe]) -> None:
    served = serving("nodes")
    served.until("prefill-0 ready at 10.0.0.1:90")
    served.until("prefill-0 memory: 3 GB of KV")
    served.until("decode-0 on 10.0.0.2: loading weights: 25 % of 4.29 GB")
    served.report_next()
    served.until("decode-0 ready at 10.0.0.2:90")
    assert served.interrupt()[0] == 0


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize(
    ("fault", "ends", "why", "log"),
    [
        pytest.param(
            "crash",
            78,
            "its process ended (exit code 1)",
            "Traceback:\nValueError: a bug",
            marks=pytest.mark.nightly,
        ),
        (
            "mute",
            1,
            "loading weights: 25 % of 4.29 GB",
            "a line\nThe time of --start-timeout is over",
        ),
    ],
)
def test_a_worker_of_another_node_that_is_not_ready_ends_it(
    serving: Callable[..., StandInServe], fault: str, ends: int, why: str, log: str
) -> None:
    served = serving("nodes", fault=fault)
    served.until("decode-0 on 10.0.0.2: loading weights")
    served.report_next()
    code, err = served.finish()
    said = f"error: decode-0 on 10.0.0.2 is not ready: {why}. The end of its log:\n{log}"
    assert code == ends and err.rstrip().endswith(said), err


def ray_daemons(instance_id: str) -> list[int]:
    daemons = (b"raylet", b"gcs_server")
    found = []
    for pid in processes_of(instance_id):
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        if program.rsplit(b"/", 1)[-1] in daemons:
            found.append(pid)
    return found


@pytest.mark.timeout(300)
def test_under_ray_workers_outlive_its_head_and_are_adopted(
    serving: Callable[..., StandInServe],
) -> None:
    served = serving("ray")
    served.until("Ray has placed the workers")
    served.until("Ready at")
    folder = served.folder()
    instance_id = read_environment(folder)["BATON_INSTANCE"]
    before = {r.worker_id: r.pid for r in DirectoryRegistry(folder / "registry").workers()}
    assert set(before) == {"prefill-0", "decode-0"}
    daemons = ray_daemons(instance_id)
    assert len(daemons) == 2
    driver = read_status(folder, "ray")
    assert driver is not None
    (folder / "ray.placed").unlink()
    for pid in (*daemons, driver.pid):
        os.kill(pid, signal.SIGKILL)
    served.until(r"ray died \(signal 9\); restarted")
    wait_until((folder / "ray.placed").exists)
    after = {r.worker_id: r.pid for r in DirectoryRegistry(folder / "registry").workers()}
    assert after == before
    os.kill(before["decode-0"], signal.SIGKILL)
    served.until(r"decode-0 died \(signal 9\); restarted")
    assert served.interrupt()[0] == 0
    assert processes_of(instance_id) == []
