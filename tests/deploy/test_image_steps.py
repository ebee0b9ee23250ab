"""The steps of the Dockerfiles, run in roots of Debian: size, packages, user, and processes that
run there."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.support.image_steps import ROOT, DebianRoots, ImageStage, build, steps_unavailable
from tests.support.waiting import wait_until

LACKING = steps_unavailable()
ROUTER_LIMIT_BYTES = 300e6
START_TIMEOUT_S = 120.0
HEAVY = ("torch", "triton", "ray", "nixl", "numba")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(LACKING), reason=f"no image here: {LACKING}"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def roots(folder: Path) -> DebianRoots:
    return DebianRoots(folder)


@pytest.fixture(scope="module")
def router(roots: DebianRoots, folder: Path) -> ImageStage:
    return build(ROOT / "deploy/docker/router.Dockerfile", roots, folder / "router")


@pytest.fixture(scope="module")
def worker(roots: DebianRoots, folder: Path) -> ImageStage:
    return build(ROOT / "deploy/docker/worker.Dockerfile", roots, folder / "worker")


def installed(stage: ImageStage) -> set[str]:
    """Return name==version of each package in an image's bill of materials."""
    bill = json.loads(stage.run(["cat", "/opt/venv/sbom.cdx.json"]))
    assert bill["bomFormat"] == "CycloneDX"
    packages = ((each["name"], each["version"]) for each in bill["components"])
    return {f"{re.sub('[-_.]+', '-', name).lower()}=={version}" for name, version in packages}


def locked(name: str) -> set[str]:
    lines = (ROOT / f"requirements/{name}.lock").read_text().splitlines()
    return {line.split()[0] for line in lines if not line.startswith("#")}


def importable(stage: ImageStage, names: tuple[str, ...]) -> list[str]:
    code = f"import importlib.util as u; print(*[x for x in {names} if u.find_spec(x)])"
    return stage.run(["python", "-c", code]).split()


def test_the_router_image_is_below_its_limit(router: ImageStage) -> None:
    size_bytes = router.size_bytes()
    print(f"router image: {size_bytes / 1e6:.0f} MB")
    assert size_bytes <= ROUTER_LIMIT_BYTES


def test_the_router_image_has_what_its_lock_lists(router: ImageStage) -> None:
    assert installed(router) == {*locked("router"), "baton-serve==0.1.0"}
    assert importable(router, HEAVY) == []


def test_the_worker_image_has_what_its_lock_lists(worker: ImageStage) -> None:
    assert installed(worker) == {*locked("cpu"), "baton-serve==0.1.0"}
    assert importable(worker, HEAVY) == list(HEAVY)


@pytest.mark.parametrize("image", ["router", "worker"])
def test_an_image_runs_as_a_user_without_rights(image: str, request: pytest.FixtureRequest) -> None:
    stage: ImageStage = request.getfixturevalue(image)
    assert (stage.user, stage.run(["id", "-u"])) == ("10001:10001", "10001\n")
    assert f"baton {image}" in stage.run(["baton", image, "--help"])
    with pytest.raises(RuntimeError, match="Permission denied"):
        stage.run(["touch", "/opt/venv/here"])


def test_a_router_image_answers_and_ends_on_sigterm(router: ImageStage, folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = router.command([
        "baton", "router", "--model=/opt/baton/baton-tiny", f"--set=router.port={port}",
        "--registry=/tmp/registry", "--set=security.tls=off",
    ])  # fmt: skip
    environment = {**router.environment, "HOME": "/tmp", "BATON_TOKEN": "a token of this test"}
    log = folder / "router.log"
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


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_a_worker_image_computes_a_chat(worker: ImageStage) -> None:
    """`baton demo --once` starts a router and a worker of each role, whose KV moves by NIXL."""
    worker.environment["HOME"] = "/tmp"
    output = worker.run(["baton", "demo", "--once", "--port=0"], timeout_s=300)
    assert "the whole answer after" in output
