"""One container as processes of this machine, in a network, mount, process, IPC and host-name
namespace, with a root file system of its own.

    /            read-only: this machine's /usr, and what the image holds
    /etc         names of its own
    mounts       of the pod's volumes, at the paths that the manifest gives

The command runs as the pod's user without capabilities, as process 1. Holds the process alone:
pod.py restarts it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos.starter import start

NAMESPACES = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
DEVICES = ("null", "zero", "full", "random", "urandom")
PATH = "/opt/programs:/usr/bin:/bin"
BORN_S = 10.0


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of this machine at a path of the container."""

    source: Path
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Image:
    """Its containers find `mounts` and `environment`; /opt/programs is on their PATH."""

    mounts: tuple[Mount, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ContainerSite:
    """Where containers of one pod run: `prefix` enters its network; `user` and `group` are the
    pod's; `resolver` is the address of the name server."""

    prefix: tuple[str, ...]
    folder: Path
    hostname: str
    user: int
    group: int
    resolver: str
    domains: str


class Container:
    """A started container. `code`: how it ended, None while it runs. `joined`: a container whose
    processes it shares."""

    def __init__(
        self,
        site: ContainerSite,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        mounts: Sequence[Mount],
        joined: Container | None = None,
    ) -> None:
        self._environment = {"PATH": PATH, **environment}
        self._site = site
        self.log = site.folder / f"{name}.log"
        root = site.folder / f"{name}.root"
        root.mkdir(exist_ok=True)
        script = "\n".join([*_root(root, site, mounts), f"exec {_confined(site, root, command)}"])
        outside = {**self._environment, "PATH": os.environ["PATH"]}
        spaces = NAMESPACES if joined is None else joined.to_join()
        with self.log.open("ab") as out:
            self._process = start([*site.prefix, *spaces, "/bin/sh", "-ec", script], outside, out)

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def to_join(self) -> tuple[str, ...]:
        """Return the words that start a container among this one's processes, as
        `shareProcessNamespace` does."""
        enter = ("nsenter", f"--target={self._first()}", "--pid", "--ipc", "--uts", "--no-fork")
        return (*enter, "unshare", "--mount", "--fork", "--kill-child")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the container's process 1, if it lives."""
        if (first := self._first()) is not None:
            os.kill(first, number)
        elif number is signal.SIGKILL:
            self._process.kill()

    def wait(self, within_s: float) -> int | None:
        """Return how it ended, or None if it runs after so many seconds."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def run(self, command: Sequence[str], within_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command in the container as `kubectl exec` does. Raises ProcessLookupError if
        the container has ended."""
        first = self._first()
        if first is None:
            raise ProcessLookupError(f"{self.log.stem} has ended")
        of_first = f"/proc/{first}"  # its working directory: another one is outside of its root
        folders = (f"--root={of_first}/root", f"--wd={of_first}/cwd")
        enter = ("nsenter", f"--target={first}", "--all", *folders)
        inner = ("env", f"PATH={PATH}", *_rights(self._site), *command)
        return subprocess.run(
            [*enter, *inner],
            env={**self._environment, "PATH": os.environ["PATH"]},
            capture_output=True, text=True, timeout=within_s, check=False,
        )  # fmt: skip

    def _first(self) -> int | None:
        """Return the process that is number 1 inside, once it is there."""
        deadline_s = time.monotonic() + BORN_S
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        while self._process.poll() is None:
            try:
                if found := children.read_text().split():
                    return int(found[0])
            except OSError:
                return None  # the process has ended
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.log.stem} does not start: {self.log.read_text()}")
            time.sleep(0.01)  # no event tells that a process has forked
        return None


def base_mounts() -> tuple[Mount, ...]:
    """Return what any image of this machine has: its libraries, this Python and Baton's code."""
    code = Path(__file__).resolve().parents[3]
    python = (Path(sys.base_prefix).resolve(), Path(sys.prefix).absolute())
    return tuple(
        Mount(path, str(path))
        for path in (Path("/usr"), Path("/etc/ssl"), Path("/etc/ld.so.cache"), *python, code)
        if path.exists()
    )


def _root(root: Path, site: ContainerSite, mounts: Sequence[Mount]) -> list[str]:
    """Return the commands of a shell that make the container's root at `root`."""
    etc = {
        "resolv.conf": f"nameserver {site.resolver}\nsearch {site.domains}\noptions ndots:5\n",
        "hosts": f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {site.hostname}\n",
        "nsswitch.conf": "passwd: files\nhosts: files dns\n",
        "passwd": f"root:x:0:0::/root:/bin/sh\nbaton:x:{site.user}:{site.group}::/tmp:/bin/sh\n",
        "group": f"root:x:0:\nbaton:x:{site.group}:\n",
    }
    lines = [
        f"mount -t tmpfs -o mode=755,size=16m tmpfs {shlex.quote(str(root))}",
        f"cd {shlex.quote(str(root))}",
        "mkdir -p usr etc proc dev sys tmp run var opt root",
        *(f"ln -s usr/{name} {name}" for name in ("bin", "sbin", "lib", "lib64")),
        "mount -t proc proc proc",
        "mount --bind /sys sys",
        *(f"touch dev/{name}; mount --bind /dev/{name} dev/{name}" for name in DEVICES),
        *(f"printf %s {shlex.quote(text)} > etc/{name}" for name, text in etc.items()),
    ]
    for mount in sorted(mounts, key=lambda each: each.target):
        source, target = shlex.quote(str(mount.source)), shlex.quote(mount.target.lstrip("/"))
        made = "mkdir -p" if mount.source.is_dir() else f"mkdir -p $(dirname {target}); touch"
        lines += [f"{made} {target}", f"mount --bind {source} {target}"]
        if mount.read_only:
            lines.append(f"mount -o remount,bind,ro {target}")
    return [*lines, f"hostname {shlex.quote(site.hostname)}", "mount -o remount,bind,ro ."]


def _confined(site: ContainerSite, root: Path, command: Sequence[str]) -> str:
    words = ("env", f"PATH={PATH}", *_rights(site), *command)
    return shlex.join(("chroot", str(root), *words))


def _rights(site: ContainerSite) -> tuple[str, ...]:
    return (
        "setpriv", f"--reuid={site.user}", f"--regid={site.group}", "--clear-groups",
        "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", "--",
    )  # fmt: skip
