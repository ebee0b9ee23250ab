"""Builds the images of the Dockerfiles with podman and runs containers of them.

The base images are imported from the roots of image_steps.py, so that no registry is asked. A step
of a build runs with `--isolation=chroot`, and a container without cgroups: a machine of CI may lack
the right to raise its memory lock limit, which both need else ("setrlimit (RLIM_MEMLOCK): Operation
not permitted"). So no container has limits of CPU and memory. podman's seccomp profile allows user
namespaces, which containerd's does not. Needs root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.image_steps import (
    OWN_MOUNTS,
    PASSED,
    ROOT,
    STEP_TIMEOUT_S,
    DebianRoots,
    base_images,
    host_files,
    steps_unavailable,
)

# crun starts no container where cgroups of both versions are mounted ("hybrid mode")
ONE_CGROUP_VERSION = """\
if [ "$(stat --file-system --format=%T /sys/fs/cgroup)" != cgroup2fs ]; then
    umount --recursive /sys/fs/cgroup
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi"""
# as the chart's pods: a read-only root with a /tmp, no capability, the runtime's seccomp profile
CONFINED = (
    "--network=host", "--cgroups=disabled", "--read-only", "--read-only-tmpfs=false",
    "--tmpfs=/tmp:mode=1777", "--cap-drop=all", "--security-opt=no-new-privileges", "--pull=never",
    # else podman asks for more than a machine has that may not raise its limits
    "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096",
)  # fmt: skip


def podman_unavailable() -> str | None:
    """Return why podman builds no image here, None where it does."""
    if shutil.which("podman") is None:
        return "podman (Debian's package podman) not found"
    return steps_unavailable()


@dataclass(frozen=True, slots=True)
class Podman:
    """Calls podman with a store of its own in `folder`."""

    folder: Path

    def command(self, *words: str) -> list[str]:
        """Return what calls podman in a mount namespace of its own."""
        store = (
            f"--root={self.folder}/images", f"--runroot={self.folder}/run",
            f"--tmpdir={self.folder}/state", "--storage-driver=overlay",
            "--cgroup-manager=cgroupfs", "--events-backend=none",
        )  # fmt: skip
        script = f"{ONE_CGROUP_VERSION}\nexec {shlex.join(('podman', *store, *words))}"
        return [*OWN_MOUNTS, "sh", "-ec", script]

    def run(self, *words: str, timeout_s: float = STEP_TIMEOUT_S) -> str:
        """Call podman and return its output. Raises RuntimeError if it fails, TimeoutExpired if it
        takes longer."""
        done = subprocess.run(
            self.command(*words), env=os.environ | {"TMPDIR": str(self.folder)}, check=False,
            cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip
        if done.returncode:
            output = f"{done.stdout}\n{done.stderr}"[-6000:]
            raise RuntimeError(f"podman {words[0]}: exit code {done.returncode}\n{output}")
        return done.stdout

    def build(self, dockerfile: Path, roots: DebianRoots, tag: str) -> None:
        """Build an image from the tree. Raises RuntimeError if a step fails, KeyError for a base
        image without a root."""
        for image in base_images(dockerfile):
            packed = self.folder / "base.tar"
            root = roots.root_of(image)
            subprocess.run(["tar", "-C", str(root), "-cf", str(packed), "."], check=True)
            self.run("import", str(packed), f"docker.io/library/{image}")
            packed.unlink()
        settings = self.folder / "pip.conf"
        settings.write_text("\n".join(["[global]", *_pip_settings()]) + "\n")
        shown = {"/etc/pip.conf": settings}  # by target: two variables may name one file
        shown |= {f"/run/{name.lower()}": path.resolve() for name, path in host_files().items()}
        mounts = [f"--volume={path}:{target}:ro" for target, path in shown.items()]
        self.run("build", "--isolation=chroot", "--network=host", "--pull=never", *mounts,
                 f"--file={dockerfile}", f"--tag={tag}", ".")  # fmt: skip


def confined(image: str, *words: str, passed: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the words of podman that run a command in a container with the rights of a pod.
    `passed`: variables that it gets from podman's caller."""
    variables = (f"--env={each}" for each in ("HOME=/tmp", *passed))
    return ("run", "--rm", *CONFINED, *variables, image, *words)


def _pip_settings() -> Iterator[str]:
    """Yield lines of pip's file of settings that say what its variables say here: a variable of
    a build would stay in the image."""
    named = host_files()
    for key, value in os.environ.items():
        if PASSED.fullmatch(key) and key.startswith("PIP_"):
            given = f"/run/{key.lower()}" if key in named else value
            yield f"{key.removeprefix('PIP_').lower().replace('_', '-')} = {given}"
    if "SSL_CERT_FILE" in named and "PIP_CERT" not in named:
        yield "cert = /run/ssl_cert_file"
    if "PIP_FIND_LINKS" in named and "PIP_RETRIES" not in os.environ:
        yield "retries = 1"  # such a host may not reach torch's own index
