"""Two models of one release on one RayCluster, whose pods run as processes: each model's driver
places its workers on its own groups, and KV moves between them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.chart import Values, example, merged, render
from tests.support.pods.cluster import PodCluster
from tests.support.pods.images import local_images
from tests.support.pods.network import network_unavailable
from tests.support.pods.pod import Pod

LACKING = network_unavailable()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(LACKING), reason=f"no pods here: {LACKING}"),
    pytest.mark.timeout(900),
]
RELEASE: Values = {
    "orchestrator": "kuberay",
    "router": {"leaveSeconds": 2},
    "models": {"second": {"model": {"embedded": True, "name": "b"}}},
}
HANDOFFS = re.compile(r"handoffs: [1-9]\d* of 5 prompts")
ROLES = ("prefill", "decode")
GROUPS = "chat-baton-ray-"


def worker(pod: Pod) -> str:
    """Return the driver and the name of each worker that a pod has run, by their logs in it."""
    logs = "cd /tmp/baton-10001; echo */*.log"
    return pod.container("worker").run(["sh", "-c", logs], 20).stdout.strip().removesuffix(".log")


def test_each_model_is_served_by_the_pods_of_its_own_groups(tmp_path: Path) -> None:
    release = render(merged(example("cpu-demo"), RELEASE))
    with PodCluster(tmp_path, local_images(tmp_path)) as cluster:
        cluster.apply(release, "pre-install")
        cluster.settle()
        said = cluster.run_test(release)  # of both models: a chat, streams, and moved KV
        assert len(HANDOFFS.findall(said)) == 2, said
        pods = [pod for role in ROLES for pod in cluster.pods(role)]
        placed = {
            pod.name.removeprefix(GROUPS).rpartition("-worker-")[0]: worker(pod) for pod in pods
        }
        assert placed == {
            "prefill": "ray-llm_chat-baton/prefill-0",
            "decode": "ray-llm_chat-baton/decode-0",
            "second-prefill": "ray-llm_chat-baton-second/prefill-0",
            "second-decode": "ray-llm_chat-baton-second/decode-0",
        }
        assert [pod.restarts for pod in pods] == [0, 0, 0, 0]
        cluster.check()
