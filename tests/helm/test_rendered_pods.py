"""The pods of values-cpu-demo.yaml as processes: secrets by the hook, a chat, KV that moved."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from baton.deploy.host.release_secrets import create_certificates, create_credentials
from baton.models.embedded import embedded_model
from chaos.redis_server import server_binary
from tests.support.chart import Document, Release, example, render
from tests.support.rendered_pods import Host, MemorySecrets, PodProcess, start_container

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(server_binary() is None, reason="no redis-server and no valkey-server"),
    pytest.mark.timeout(900),
]
ADDRESSES = {"redis": "127.0.0.1", "decode": "127.0.7.3", "prefill": "127.0.7.2",
             "router": "127.0.7.1"}  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pod_of(release: Release, component: str) -> Document:
    kind = "Deployment" if component == "router" else "StatefulSet"
    return dict(release.named(kind, component)["spec"]["template"]["spec"])


@pytest.fixture
def release() -> Release:
    return render(example("cpu-demo"))


@pytest.fixture
def pods(release: Release, tmp_path: Path) -> Iterator[dict[str, PodProcess]]:
    """Each pod of the release, ready, one after the other."""
    secrets = MemorySecrets()
    create_credentials(secrets, "chat-baton")
    create_certificates(secrets, "chat-baton", "chat-baton-worker.llm")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "valkey-server").symlink_to(str(server_binary()))
    (programs / "baton").symlink_to(Path(sys.executable).with_name("baton"))
    port = str(free_port())
    names = {
        "chat-baton-redis.llm:6379": f"127.0.0.1:{port}",
        "port 6379": f"bind 127.0.0.1\\nport {port}",
        "/opt/baton/baton-tiny": str(embedded_model()),
        "/data/": f"{tmp_path}/",
    }
    host = Host(tmp_path, secrets, names, programs)
    running: dict[str, PodProcess] = {}
    with ExitStack() as stack:
        for component, address in ADDRESSES.items():
            pod = pod_of(release, component)
            running[component] = start_container(host, pod, f"chat-{component}-0", address)
            stack.callback(running[component].process.wait)
            stack.callback(running[component].process.kill)
            if component in ("router", "decode", "prefill"):
                running[component].wait_ready()
        yield running


def test_the_release_serves_moves_kv_and_ends_in_time(
    release: Release, pods: dict[str, PodProcess]
) -> None:
    check = release.named("Pod", "test")["spec"]["containers"][0]
    assert check["command"] == ["baton", "release", "check"]
    keys = environment_of(pods["router"])["BATON_ROUTER__API_KEYS"]
    environment = {"BATON_API_KEY": keys, "PATH": "/usr/bin"}
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("baton")), "release", "check",
            f"--url={pods['router'].url('http')}", "--model=baton-tiny",
            f"--decode={pods['decode'].url('admin')}",
        ],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "handoffs: " in done.stdout
    drain_within(pods["prefill"])
    for component in ("router", "decode"):
        assert pods[component].alive()
        grace_s = pod_of(release, component)["terminationGracePeriodSeconds"]
        assert pods[component].stop(grace_s) == 0, pods[component].log.read_text()[-2000:]


def drain_within(pod: PodProcess) -> None:
    """Drain a worker as `kubectl exec POD -- baton drain WORKER` would, and wait for its end."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("baton")), "drain", pod.name],
        env=environment_of(pod), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert pod.process.wait(60) == 0, pod.log.read_text()[-2000:]


def environment_of(pod: PodProcess) -> dict[str, str]:
    entries = Path(f"/proc/{pod.process.pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)
