"""The identity of the machine that a process runs on, the same in all of its containers.

Linux draws it at each boot. Workers tell it to their peers, which remember what they measured
between two machines; nothing trusts it.
"""

from __future__ import annotations

from pathlib import Path

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
MAX_CHARACTERS = 64


def host_id(file: Path = BOOT_ID_FILE) -> str | None:
    """Return the machine's identity; None where it cannot be read."""
    try:
        return file.read_text().strip()[:MAX_CHARACTERS] or None
    except OSError:
        return None
