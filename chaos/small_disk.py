"""A disk of a few MiB for logs, registry and address files, that a scenario can fill.

A tmpfs, mounted where the cluster's folder is and taken away with it. Needs root and the right
to mount; `unavailable` says what is missing. `remove_leftovers` removes the folders of killed runs,
with disks that are still mounted there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from chaos.network import names_of_ended

SIZE = "16m"
FILL_BYTES = 1 << 20
COMMAND_S = 10
FOLDER_PREFIX = f"baton-chaos-{os.getpid()}-"  # of the folder of a run
_FOLDER = re.compile(r"baton-chaos-(\d+)-\w+")


class DiskError(RuntimeError):
    """mount or umount failed; the message is its own."""


def unavailable() -> str | None:
    """Return why no such disk can be made here, None where it can."""
    try:
        with tempfile.TemporaryDirectory() as folder, SmallDisk(Path(folder)):
            return None
    except DiskError as error:
        return str(error)


class SmallDisk:
    """Mounted at `folder` while it is entered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._filling = folder / "filling"

    def __enter__(self) -> SmallDisk:
        _do("mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0700", "tmpfs", str(self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        _do("umount", "--lazy", str(self._folder))

    def fill(self) -> None:
        """Take every byte that is left."""
        with open(self._filling, "wb", buffering=0) as file:
            size = FILL_BYTES
            while size:
                try:
                    if not file.write(b"\0" * size):
                        return
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def clear(self) -> None:
        self._filling.unlink(missing_ok=True)


def remove_leftovers(parent: Path | None = None) -> list[str]:
    """Remove the folders of killed runs below `parent` (None: that of temporary files); return the
    names of those that are gone."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    removed = []
    for name in names_of_ended(parent, _FOLDER):
        folder = parent / name
        for mount in mounts:
            if mount.startswith(f"{folder}/"):
                with contextlib.suppress(DiskError):
                    _do("umount", "--lazy", mount)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            removed.append(name)
    return removed


def _do(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DiskError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise DiskError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
