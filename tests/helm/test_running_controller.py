"""The pods of `autoscaling.mode: baton` as processes: one group of workers serves; of two
controllers one leads and reads the fleet, and the other takes over."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.planner.control.leadership import TERM_S
from tests.support.chart import Document, Release, example, merged, render
from tests.support.rendered_pods import (
    PlannedPod,
    PodProcess,
    check_release,
    demo_host,
    running_pods,
)
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
]
PODS = {  # component, number of its pod, address
    "redis": ("redis", 0, "127.0.0.1"),
    "worker-0": ("worker", 0, "127.0.8.2"),
    "worker-1": ("worker", 1, "127.0.8.3"),
    "router": ("router", 0, "127.0.8.1"),
    "controller-0": ("controller", 0, "127.0.8.4"),
    "controller-1": ("controller", 1, "127.0.8.5"),
}


@pytest.fixture(scope="module")
def release() -> Release:
    scaling = {"mode": "baton", "baton": {"ttftSeconds": 2}}
    return render(merged(example("cpu-demo"), {"autoscaling": scaling}))


def pod_of(release: Release, component: str) -> Document:
    kind = "StatefulSet" if component in ("redis", "worker") else "Deployment"
    return dict(release.named(kind, component)["spec"]["template"]["spec"])


@pytest.fixture
def pods(release: Release, tmp_path: Path) -> Iterator[dict[str, PodProcess]]:
    """All pods of the release, ready."""
    planned = {
        name: PlannedPod(pod_of(release, component), f"chat-baton-{component}-{number}", address)
        for name, (component, number, address) in PODS.items()
    }
    with demo_host(tmp_path) as host, running_pods(host, planned) as running:
        yield running


def leads(pod: PodProcess) -> bool:
    with urllib.request.urlopen(pod.url("admin") + "/metrics", timeout=5) as answer:
        page = answer.read().decode()
    return "baton_controller_leads 1.0" in page.splitlines()


def leaders(pods: dict[str, PodProcess], *names: str) -> list[str]:
    return [name for name in names if leads(pods[name])]


def test_workers_of_one_group_serve_and_one_controller_leads(
    pods: dict[str, PodProcess],
) -> None:
    check_release(pods["router"], pods["worker-1"])
    both = ("controller-0", "controller-1")
    (leader,) = leaders(pods, *both)
    (follower,) = set(both) - {leader}
    log = pods[leader].log.read_text()
    assert "fleet not read" not in log and '"mode":"leads"' in log, log[-3000:]
    pods[leader].process.kill()
    wait_until(  # the other's key has to expire
        lambda: leaders(pods, follower) == [follower],
        3 * TERM_S,
        every_s=0.5,
        show=lambda: pods[follower].log.read_text()[-3000:],
    )
    assert pods[follower].stop(15) == 0
