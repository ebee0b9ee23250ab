"""How much memory this process may still take: the host's, or its container's limit.

Reads the kernel's own figures; keeps no state.
"""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """The least of what the kernel calls available and what the container has left."""
    available = _meminfo_available(meminfo)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    return min(available, max(limit - used, 0))


def _meminfo_available(meminfo: Path) -> int:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: Path) -> int | None:
    """None where the file is absent or says "max"."""
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)
