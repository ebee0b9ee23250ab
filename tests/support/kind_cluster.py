"""A real cluster by kind, with the CPU images of this checkout, where a machine has the programs.

    ENGINE build (the heads of deploy/docker) ── ENGINE save ──▶ kind load ──▶ helm, kubectl, curl

ENGINE is docker or podman. No machine that ran these tests had one: the order of the commands was
seen with scripted programs alone (tests/helm/test_kind_cluster.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.chart import ROOT
from tests.support.pods.user import END_JOBS

PROGRAMS = ("kind", "kubectl", "helm", "curl")
ENGINES = ("docker", "podman")
REGISTRY = "docker.io/library"  # under which a node looks for a name without a registry
BUILD_S, CREATE_S, TYPED_S = 1800.0, 600.0, 900.0
_BUILD = re.compile(r"^#   docker build (.+) -t (\S+) \.$", re.MULTILINE)


def programs_missing() -> str:
    """Return which programs of a kind cluster are not on PATH, empty where all are."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not any(map(shutil.which, ENGINES)):
        missing.append(" or ".join(ENGINES))
    return ", ".join(missing)


def cpu_builds() -> list[tuple[str, list[str]]]:
    """Return name and arguments of the images that the Dockerfiles' heads build for CPUs: those
    that values-cpu-demo.yaml names."""
    heads = [path.read_text() for path in sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))]
    built = _BUILD.findall("\n".join(heads))
    return [(image, how.split()) for how, image in built if "REQUIREMENTS" not in how]


@dataclass(frozen=True, slots=True)
class KindCluster:
    """A cluster, and a user's machine that reaches it by `kubeconfig` alone."""

    name: str
    engine: str
    kubeconfig: Path

    def environment(self) -> dict[str, str]:
        provider = {"KIND_EXPERIMENTAL_PROVIDER": self.engine}
        return {**os.environ, **provider, "KUBECONFIG": str(self.kubeconfig)}

    def run(self, *words: str, timeout_s: float) -> None:
        """Run a program. Raises AssertionError with its output if it fails."""
        done = subprocess.run(
            words, cwd=ROOT, env=self.environment(), stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}"

    def shell(self, script: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-ec", f"{END_JOBS}\n{script}"], cwd=ROOT, env=self.environment(),
            stdin=subprocess.DEVNULL, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def typed(self, script: str) -> str:
        process = self.shell(script)
        text, _ = process.communicate(timeout=TYPED_S)
        assert process.returncode == 0, text
        return text

    def logs(self) -> str:
        """Return the state of pods and the events, as far as kubectl gets them."""
        text, _ = self.shell("kubectl get pods -o wide; kubectl get events").communicate()
        return text


@contextmanager
def kind_cluster(folder: Path) -> Iterator[KindCluster]:
    """Yield a cluster that has the images, and delete it at the end, also one that is half made."""
    engine = next(name for name in ENGINES if shutil.which(name) is not None)
    name = f"baton-{uuid.uuid4().hex[:8]}"
    cluster = KindCluster(name, engine, folder / "kubeconfig")
    archives = []
    for number, (image, how) in enumerate(cpu_builds()):
        full, archive = f"{REGISTRY}/{image}", str(folder / f"image-{number}.tar")
        cluster.run(engine, "build", *how, "-t", full, ".", timeout_s=BUILD_S)
        cluster.run(engine, "save", "-o", archive, full, timeout_s=CREATE_S)
        archives.append(archive)
    named = ("--name", name)
    own = (*named, "--kubeconfig", str(cluster.kubeconfig))
    try:
        cluster.run("kind", "create", "cluster", *own, "--wait", "300s", timeout_s=CREATE_S)
        for archive in archives:
            cluster.run("kind", "load", "image-archive", archive, *named, timeout_s=CREATE_S)
        yield cluster
    finally:
        cluster.run("kind", "delete", "cluster", *own, timeout_s=CREATE_S)
