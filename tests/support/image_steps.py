"""Runs the instructions of a Dockerfile in roots of Debian made by mmdebstrap, without Docker.

    root (mmdebstrap) ─┬─ overlay: stage build ── COPY --from ──┐
                       └─ overlay: the last stage ◀─────────────┘

Understands FROM, ARG, ENV, WORKDIR, COPY, RUN, USER; ENTRYPOINT and CMD concern a container alone.
A root has what debian:bookworm-slim has: required packages, no documentation. Under the name of
python:3.11-slim-bookworm it has Debian's Python 3.11 beside. Each command has a mount namespace of
its own, so that no mount outlives it: a folder that shows the host's /dev must never be one that a
later run of pytest removes. Needs root.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DEBIAN = "debian:bookworm-slim"
PACKAGES = {
    DEBIAN: "usr-is-merged",
    "python:3.11-slim-bookworm": "usr-is-merged,python3,python3-venv,ca-certificates",
}
MERGED_USR = "/usr/share/mmdebstrap/hooks/merged-usr"  # /bin and /lib as Debian's image has them
LEFT_OUT = ("doc", "man", "info", "groff", "lintian", "linda", "locale")  # of /usr/share
STEP_TIMEOUT_S = 900.0
OWN_MOUNTS = ("unshare", "--mount", "--propagation=private", "--")
PASSED = re.compile(r"PIP_\w+|\w+_proxy|SSL_CERT_FILE", re.IGNORECASE)
HOST_FILES = ("PIP_CERT", "SSL_CERT_FILE", "PIP_FIND_LINKS")  # variables that name files


def steps_unavailable() -> str | None:
    """Return why no root can be made here, None where it can."""
    if shutil.which("mmdebstrap") is None:
        return "mmdebstrap (Debian's package mmdebstrap) not found"
    return "needs root" if os.geteuid() else None


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return name and arguments of each instruction of a Dockerfile."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (x.partition(" ") for x in joined.splitlines() if x)]


def base_images(path: Path) -> set[str]:
    """Return the images that a Dockerfile's stages begin with, but for its own stages."""
    stages = [rest.partition(" AS ") for word, rest in instructions(path) if word == "FROM"]
    return {image for image, _, _ in stages} - {name for _, _, name in stages}


@dataclass(slots=True)
class DebianRoots:
    """The roots that stages begin with, each made when it is first asked for."""

    folder: Path
    _made: dict[str, Path] = field(default_factory=dict)

    def root_of(self, image: str) -> Path:
        """Raises KeyError for an image without a root, CalledProcessError if mmdebstrap fails."""
        if image not in self._made:
            root = self.folder / image.replace(":", "-")
            command = [
                *OWN_MOUNTS, "mmdebstrap", "--quiet", "--variant=minbase",
                f"--hook-dir={MERGED_USR}", f"--include={PACKAGES[image]}", "bookworm", str(root),
            ]  # fmt: skip
            subprocess.run(command, check=True, timeout=STEP_TIMEOUT_S)
            exclusions = root / "etc/dpkg/dpkg.cfg.d/slim"
            exclusions.write_text(
                "".join(f"path-exclude /usr/share/{name}/*\n" for name in LEFT_OUT)
            )
            for name in LEFT_OUT:
                shutil.rmtree(root / "usr/share" / name, ignore_errors=True)
            self._made[image] = root
        return self._made[image]


@dataclass(slots=True)
class ImageStage:
    """One stage while its steps run. `layers` lie on Debian's root `base`, its own first."""

    path: Path
    base: Path
    layers: tuple[Path, ...]
    folder: str = "/"
    user: str = "0:0"
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    )

    def command(self, words: Sequence[str], shown: Sequence[str] = ()) -> list[str]:
        """Return what runs a command as the stage's user, in the stage's files and the host's
        network. `shown` are mounts besides."""
        root = self.path / "root"
        steps = [*shown, self.mount(), f"mount -t proc proc {root}/proc",
                 f"mount -t sysfs -o ro sysfs {root}/sys",  # UCX finds network devices there
                 f"mount --rbind /dev {root}/dev", *_host_mounts(root)]  # fmt: skip
        inside = f"cd {self.folder} && exec {shlex.join(words)}"
        steps += [
            f"exec chroot --userspec={self.user} {root} /bin/sh -c {shlex.quote(inside)}",
        ]
        return [*OWN_MOUNTS, "sh", "-ec", "\n".join(steps)]

    def mount(self) -> str:
        """Return the command that shows the stage's files at `path`/root."""
        lower = ":".join(str(path) for path in (*self.layers[1:], self.base))
        options = f"lowerdir={lower},upperdir={self.layers[0]},workdir={self.path}/work"
        return f"mount -t overlay -o {options} overlay {self.path}/root"

    def variables(self) -> dict[str, str]:
        """Return the environment of a command: what reaches the network, and the stage's own."""
        passed = {key: value for key, value in os.environ.items() if PASSED.fullmatch(key)}
        passed |= {name: f"/run/{name.lower()}" for name in host_files()}
        if "PIP_FIND_LINKS" in passed:  # such a host may not reach torch's own index
            passed["PIP_RETRIES"] = "1"
        return passed | self.environment

    def run(self, words: Sequence[str], timeout_s: float = STEP_TIMEOUT_S) -> str:
        """Run a command as the stage's user and return its output. Raises RuntimeError if it fails,
        TimeoutExpired if it takes longer."""
        return _run(self.command(words), self.variables(), timeout_s)

    def put(self, source: str, target: str, shown: Sequence[str] = ()) -> None:
        """Copy a file or folder of this host, or of a stage that `shown` mounts."""
        copied = f"cp -a {source} {self.path}/root{target}"
        script = "\n".join([*shown, self.mount(), copied])
        _run([*OWN_MOUNTS, "sh", "-ec", script], dict(os.environ), STEP_TIMEOUT_S)

    def size_bytes(self) -> int:
        """Return the size of Debian's root and of all layers, as the image's layers have it."""
        paths = [str(path) for path in (self.base, *self.layers)]
        done = subprocess.run(
            ["du", "--summarize", "--bytes", "--total", *paths],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return int(done.stdout.splitlines()[-1].split()[0])


def _run(command: Sequence[str], environment: dict[str, str], timeout_s: float) -> str:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        output = f"{done.stdout}\n{done.stderr}"[-6000:]
        raise RuntimeError(f"{command[-1]}: exit code {done.returncode}\n{output}")
    return done.stdout


def host_files() -> dict[str, Path]:
    """Return the files and folders that variables of pip and TLS name."""
    found = {name: Path(os.environ.get(name, "")) for name in HOST_FILES}
    return {name: path for name, path in found.items() if path.is_absolute() and path.exists()}


def _host_mounts(root: Path) -> Iterator[str]:
    """Yield mounts of what this host reaches the network by; a layer keeps empty files."""
    yield f"touch {root}/etc/resolv.conf"
    yield f"mount --bind {Path('/etc/resolv.conf').resolve()} {root}/etc/resolv.conf"
    for name, path in host_files().items():
        target = root / "run" / name.lower()
        yield f"{'mkdir -p' if path.is_dir() else 'touch'} {target}"
        yield f"mount --bind {path.resolve()} {target}"


def build(dockerfile: Path, roots: DebianRoots, folder: Path, **arguments: str) -> ImageStage:
    """Run all steps and return the last stage. `arguments` are those of `--build-arg`.

    Raises RuntimeError for a step that fails, ValueError for an instruction that this module does
    not know, KeyError for a base image that it does not know.
    """
    stages: dict[str, ImageStage] = {}
    for word, rest in instructions(dockerfile):
        if word == "FROM":
            image, _, name = rest.partition(" AS ")
            stage = _new_stage(roots, image, stages.get(image), folder / (name or "last"))
            stages[name or "last"] = stage
        else:
            _run_step(word, rest, stage, stages, arguments)
    return stage


def _new_stage(roots: DebianRoots, image: str, below: ImageStage | None, path: Path) -> ImageStage:
    for name in ("root", "layer", "work"):
        (path / name).mkdir(parents=True)
    if below is None:
        return ImageStage(path, roots.root_of(image), (path / "layer",))
    layers = (path / "layer", *below.layers)
    return ImageStage(path, below.base, layers, environment=dict(below.environment))


def _run_step(
    word: str,
    rest: str,
    stage: ImageStage,
    stages: dict[str, ImageStage],
    arguments: dict[str, str],
) -> None:
    if word == "ARG":
        name, _, default = rest.partition("=")
        stage.environment[name] = arguments.get(name, default)
    elif word == "ENV":
        for name, value in (each.split("=", 1) for each in rest.split()):
            stage.environment[name] = value.replace("$PATH", stage.environment["PATH"])
    elif word == "WORKDIR":
        stage.run(["mkdir", "-p", rest])
        stage.folder = rest
    elif word == "COPY":
        _copy(rest.split(), stage, stages)
    elif word == "RUN":
        stage.run(["sh", "-c", rest])
    elif word == "USER":
        stage.user = rest
    elif word not in ("ENTRYPOINT", "CMD"):
        raise ValueError(f"{word} is an instruction that image_steps.py does not know")


def _copy(words: list[str], stage: ImageStage, stages: dict[str, ImageStage]) -> None:
    """Copy from another stage, or what git has of the tree into the stage's folder."""
    if words[0].startswith("--from="):
        other = stages[words[0].removeprefix("--from=")]
        stage.put(f"{other.path}/root{words[1]}", words[2], [other.mount()])
        return
    *sources, target = words
    context = stage.path / "context"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *sources]
    found = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, found.split("\0")):
        if (ROOT / name).is_file():  # else deleted, and not committed yet
            copy = context / (name if sources == ["."] else Path(name).relative_to(sources[0]))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy)
    inside = os.path.normpath(f"{stage.folder}/{target}")
    stage.run(["mkdir", "-p", inside])
    stage.put(f"{context}/.", inside)
    shutil.rmtree(context)
