"""A controller changes the number of workers on a real Ray cluster, and no request fails."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.network import unavailable
from tests.support.ray_fleet import Fleet, running_fleet

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces: {unavailable()}"),
]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path) as made:
        yield made


@contextlib.contextmanager
def controller(fleet: Fleet, workers: str) -> Iterator[None]:
    """Let a controller keep the fleet within these bounds, whatever the load."""
    process = fleet.start_controller("--act", "--resize=fleet", f"--workers={workers}")
    yield
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, fleet.logs()


def test_a_controller_changes_the_number_of_workers_on_ray(fleet: Fleet) -> None:
    fleet.add_node("n1", {"baton-prefill": 1})
    fleet.add_node("n2", {"baton-decode": 2})
    driver = fleet.start_driver("--by-role", "--follow", "--cpus", "0")
    fleet.start_router()
    fleet.until_linked(prefill=1, decode=1)
    with fleet.asking() as asking:
        with controller(fleet, "3-3"):
            fleet.until_linked(prefill=1, decode=2)
        with controller(fleet, "2-2"):  # it waits for a minute after the last change
            fleet.until_linked(prefill=1, decode=1)
    assert asking.asked > 0 and asking.wrong == [], fleet.logs()
    fleet.until(lambda: sorted(fleet.audit()["ready"]) == ["decode-0", "prefill-0"])
    assert "worker drain ordered" in (fleet.folder / "controller.log").read_text()
    # the worker that leaves drains first; its group goes after it
    fleet.until(lambda: fleet.groups().keys() == {"decode-0", "prefill-0"})

    driver.send_signal(signal.SIGKILL)  # its successor's command line says one decode worker
    driver.wait(10)
    with controller(fleet, "3-3"):
        driver = fleet.start_driver("--by-role", "--follow", "--cpus", "0")
        fleet.until_linked(prefill=1, decode=2)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(90) == 0, fleet.logs()
    assert fleet.workers_on("n1") == fleet.workers_on("n2") == [] and fleet.groups() == {}
