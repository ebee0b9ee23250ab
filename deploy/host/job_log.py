"""A job's log: a file that its processes append to, and that its supervisor cuts when it has grown.

    <job>.log     what is being written        <job>.log.1     what was written before

The processes hold the file open, and libraries in C write to it too, so it is not put aside but
copied, and then cut. The file lies in the instance's folder and goes with it, or, where the user
wants to keep it, in a folder of theirs, with a link to it in its place. Keeps no state.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Literal

from baton.runtime.errors import ConfigError

END_LINES = 20
END_BYTES = 8 << 10
CUT = b"the log was cut, and what it held is lost: %s\n"


def open_log(folder: Path, job: str) -> BinaryIO:
    """Open a job's log for appending, made readable by this user alone. Raises OSError."""
    return _open(folder / f"{job}.log", "ab")


def keep_logs(folder: Path, jobs: Iterable[str], kept: Path) -> None:
    """Let the logs of an instance's jobs lie in `kept`, by the instance's name and the job's.
    Raises ConfigError if they cannot."""
    try:
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        for job in jobs:
            open_log(kept, f"{folder.name}-{job}").close()
            (folder / f"{job}.log").symlink_to(kept.resolve() / f"{folder.name}-{job}.log")
    except OSError as error:
        raise ConfigError(
            f"telemetry.log_folder {kept} cannot be used ({error.strerror or error}): give a "
            "folder that this user can write"
        ) from error


def log_end(folder: Path, job: str) -> str:
    """Return the last lines of a job's log, END_LINES and END_BYTES at most, or why it cannot be
    read."""
    try:
        with open(folder / f"{job}.log", "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - END_BYTES))
            text = log.read(END_BYTES).decode(errors="replace")
    except OSError as error:
        return f"it cannot be read: {error}"
    return "\n".join(text.splitlines()[-END_LINES:])


def rotate(folder: Path, job: str, most_bytes: int) -> bool:
    """Whether the log was longer than that, and was cut. What it held stands beside it, for one
    turn; on a full disk it is lost. A line that is written while the cut is made may be lost.
    Raises OSError if it cannot be looked at or cut."""
    path = (folder / f"{job}.log").resolve()
    if path.stat().st_size <= most_bytes:
        return False
    before = path.with_name(f"{path.name}.1")
    with path.open("r+b") as log:
        try:
            with _open(before, "wb") as copy:
                shutil.copyfileobj(log, copy)
            os.truncate(path, 0)
        except OSError as error:
            before.unlink(missing_ok=True)
            os.truncate(path, 0)
            with _open(path, "ab") as cut:
                cut.write(CUT % str(error).encode())
    return True


def _open(path: Path, mode: Literal["ab", "wb"]) -> BinaryIO:
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))
