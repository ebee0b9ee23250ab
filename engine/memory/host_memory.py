"""How much memory this process has, and may still take: the host's, or its container's limit.

Reads the kernel's own figures. Keeps no state but the C library's thresholds, which are the
process's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_STATUS = Path("/proc/self/status")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_SMALL_BYTES, _LARGE_BYTES = 128 << 10, 32 << 20  # where glibc's own threshold starts, and ends


def available_bytes(
    meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, own: Path = _OWN_GROUP
) -> int:
    """The least of what the kernel calls available, and what is left to each control group (v2)
    that this process is in. Pages of files count as available, which the kernel gives up when
    others need them: weights that were just read are such pages."""
    left = [_left_to(group) for group in _groups(cgroup, own)]
    return min([_meminfo_available(meminfo), *(count for count in left if count is not None)])


def resident_bytes(status: Path = _STATUS) -> int:
    """This process's own memory, shared memory included and mapped files not: their pages go
    when others need them. 0 where the kernel does not tell."""
    if not status.exists():
        return 0
    lines = (line.partition(":") for line in status.read_text().splitlines())
    return sum(
        int(rest.split()[0]) * 1024 for name, _, rest in lines if name in ("RssAnon", "RssShmem")
    )


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Within the block, memory of freed tensors goes back to the system at once.

    glibc would raise its threshold with every large block that is freed, and then keep and
    scatter them: a model that is packed while it loads was measured to take 1.7 times its size.
    Afterwards the threshold is as high as it goes by itself, so that steps reuse their memory.
    Elsewhere than on glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _SMALL_BYTES)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGE_BYTES)


def _meminfo_available(meminfo: Path) -> int:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _groups(cgroup: Path, own: Path) -> list[Path]:
    """The folders of this process's group and of those around it. In a container `cgroup` itself
    is often its group, whatever path the host knows it by."""
    lines = own.read_text().splitlines() if own.exists() else []
    path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    inner = cgroup / path
    return [inner, *(outer for outer in inner.parents if outer.is_relative_to(cgroup))]


def _left_to(group: Path) -> int | None:
    """None where it has no limit."""
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is None or used is None:
        return None
    stat = group / "memory.stat"
    counts = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    files = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
    return max(limit - max(used - files, 0), 0)


def _number(path: Path) -> int | None:
    """None where the file is absent or says "max"."""
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)
