"""A disk of a few MiB for logs, registry and address files, that a scenario can fill.

A tmpfs, mounted where the cluster's folder is and taken away with it. Needs root and the right
to mount; `unavailable` says what is missing.
"""

from __future__ import annotations

import errno
import subprocess
import tempfile
from pathlib import Path

SIZE = "16m"
FILL_BYTES = 1 << 20
COMMAND_S = 10


class DiskError(RuntimeError):
    """mount or umount failed; the message is its own."""


def unavailable() -> str:
    """Why no such disk can be made here; empty where it can."""
    try:
        with tempfile.TemporaryDirectory() as folder, SmallDisk(Path(folder)):
            return ""
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


def _do(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DiskError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise DiskError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
