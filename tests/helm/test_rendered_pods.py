"""The pods of values-cpu-demo.yaml as processes: secrets by the hook, a chat, KV that moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chart import Document, Release, example, render
from tests.support.rendered_pods import (
    BATON,
    PlannedPod,
    PodProcess,
    check_release,
    demo_host,
    running_pods,
)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]
ADDRESSES = {"redis": "127.0.0.1", "decode": "127.0.7.3", "prefill": "127.0.7.2",
             "router": "127.0.7.1"}  # fmt: skip


def pod_of(release: Release, component: str) -> Document:
    kind = "Deployment" if component == "router" else "StatefulSet"
    return dict(release.named(kind, component)["spec"]["template"]["spec"])


@pytest.fixture
def release() -> Release:
    return render(example("cpu-demo"))


@pytest.fixture
def pods(release: Release, tmp_path: Path) -> Iterator[dict[str, PodProcess]]:
    """Each pod of the release, ready."""
    planned = {
        component: PlannedPod(pod_of(release, component), f"chat-{component}-0", address)
        for component, address in ADDRESSES.items()
    }
    with demo_host(tmp_path) as host, running_pods(host, planned) as running:
        yield running


def test_the_release_serves_moves_kv_and_ends_in_time(
    release: Release, pods: dict[str, PodProcess]
) -> None:
    check = release.named("Pod", "test")["spec"]["containers"][0]
    assert check["command"] == ["baton", "release", "check"]
    check_release(pods["router"], pods["decode"])
    drain_within(pods["prefill"])
    for component in ("router", "decode"):
        assert pods[component].alive()
        grace_s = pod_of(release, component)["terminationGracePeriodSeconds"]
        assert pods[component].stop(grace_s) == 0, pods[component].log.read_text()[-2000:]


def drain_within(pod: PodProcess) -> None:
    """Drain a worker as `kubectl exec POD -- baton drain WORKER` would, and wait for its end."""
    done = pod.run([str(BATON), "drain", pod.name])
    assert done.returncode == 0, done.stdout + done.stderr
    assert pod.process.wait(60) == 0, pod.log.read_text()[-2000:]
