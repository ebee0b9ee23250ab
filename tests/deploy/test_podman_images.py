"""podman builds the images of the Dockerfiles, and their containers work with the rights that the
chart gives to its pods: a user without capabilities, a read-only root, a seccomp profile."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.test_image_steps import ROUTER_LIMIT_BYTES, START_TIMEOUT_S, answers
from tests.support.image_steps import ROOT, DebianRoots
from tests.support.podman_images import Podman, confined, podman_unavailable
from tests.support.waiting import wait_until

LACKING = podman_unavailable()
RIGHTS = "id -u; grep -E '^(CapBnd|CapEff|NoNewPrivs|Seccomp):' /proc/self/status"
FORBIDDEN = {
    "touch /var/here": "Read-only file system",
    "setarch --addr-no-randomize true": "failed to set personality",  # the seccomp profile
}
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(LACKING), reason=f"no image here: {LACKING}"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    # podman refuses a store whose path is longer than 50 characters, as pytest's folders are
    with tempfile.TemporaryDirectory(prefix="podman-") as folder:
        yield Podman(Path(folder))


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> DebianRoots:
    return DebianRoots(tmp_path_factory.mktemp("roots"))


@pytest.fixture(scope="module")
def router(podman: Podman, roots: DebianRoots) -> str:
    podman.build(ROOT / "deploy/docker/router.Dockerfile", roots, "baton-router")
    return "localhost/baton-router"


@pytest.fixture(scope="module")
def worker(podman: Podman, roots: DebianRoots) -> str:
    podman.build(ROOT / "deploy/docker/worker.Dockerfile", roots, "baton-worker")
    return "localhost/baton-worker"


def test_the_router_image_is_what_its_dockerfile_says(podman: Podman, router: str) -> None:
    (image,) = json.loads(podman.run("image", "inspect", router))
    print(f"router image built by podman: {image['Size'] / 1e6:.0f} MB")
    assert image["Size"] <= ROUTER_LIMIT_BYTES
    assert (image["User"], image["Config"]["Cmd"]) == ("10001:10001", ["baton", "router", "--help"])
    assert "PYTHONUNBUFFERED=1" in image["Config"]["Env"]
    assert not [name for name in image["Config"]["Env"] if name.startswith("PIP_")]
    assert "baton router" in podman.run(*confined(router))


def test_a_container_has_the_rights_of_a_pod(podman: Podman, router: str) -> None:
    user, *rights = podman.run(*confined(router, "sh", "-c", RIGHTS)).splitlines()
    found = dict(line.split(":\t") for line in rights)
    none = "0" * 16
    assert (user, found) == (
        "10001",
        {"CapEff": none, "CapBnd": none, "NoNewPrivs": "1", "Seccomp": "2"},
    )
    for command, refusal in FORBIDDEN.items():
        with pytest.raises(RuntimeError, match=refusal):
            podman.run(*confined(router, "sh", "-c", command))


def test_a_router_container_answers_and_ends_on_sigterm(podman: Podman, router: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = podman.command(*confined(
        router, "baton", "router", "--model=/opt/baton/baton-tiny", f"--set=router.port={port}",
        "--registry=/tmp/registry", "--set=security.tls=off", passed=["BATON_TOKEN"],
    ))  # fmt: skip
    environment = os.environ | {"BATON_TOKEN": "a token of this test"}
    log = podman.folder / "router.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:

        def listens() -> bool:
            assert process.poll() is None, log.read_text()
            return answers(port)

        wait_until(listens, START_TIMEOUT_S, every_s=0.2, show=log.read_text)
        process.terminate()
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_a_worker_container_computes_a_chat(podman: Podman, worker: str) -> None:
    """`baton demo --once` starts a router and a worker of each role, whose KV moves by NIXL under
    the runtime's own seccomp profile and on its 64 MB of /dev/shm."""
    words = confined(worker, "baton", "demo", "--once", "--port=0")
    assert "the whole answer after" in podman.run(*words, timeout_s=300)
