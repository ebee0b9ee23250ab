"""The memory that this process uses and may still take, within the host's or container's limit.

The module reads the kernel's figures. It keeps no state except the C library's thresholds, which
belong to the process.
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
_SMALL_BYTES, _LARGE_BYTES = 128 << 10, 32 << 20  # bounds of glibc's own threshold


def available_bytes(
    meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, own: Path = _OWN_GROUP
) -> int:
    """Return the minimum of the kernel's `MemAvailable` and of what remains to each control group
    (v2) of this process. File pages count as available, since the kernel reclaims them on demand:
    weights that were just read are such pages."""
    left = [_left_to(group) for group in _groups(cgroup, own)]
    return min([_meminfo_available(meminfo), *(count for count in left if count is not None)])


def resident_bytes(status: Path = _STATUS) -> int:
    """Return this process's own memory, with shared memory and without mapped files, whose pages
    the kernel can reclaim. 0 if the kernel does not report it."""
    if not status.exists():
        return 0
    lines = (line.partition(":") for line in status.read_text().splitlines())
    return sum(
        int(rest.split()[0]) * 1024 for name, _, rest in lines if name in ("RssAnon", "RssShmem")
    )


@contextmanager
def release_freed_memory() -> Iterator[None]:
    """Return the memory of freed tensors to the system at once, within the `with` block.

    glibc raises its threshold with every large block that is freed, and then keeps freed memory
    in fragments: a model that was packed while it loaded took 1.7 times its size. After the
    block, the threshold has its highest automatic value, so that steps reuse their memory. On
    another C library the function has no effect.
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
    """Return the folders of this process's control group and of all groups that contain it. In a
    container, `cgroup` itself is often the group, whatever its path on the host."""
    lines = own.read_text().splitlines() if own.exists() else []
    path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    inner = cgroup / path
    return [inner, *(outer for outer in inner.parents if outer.is_relative_to(cgroup))]


def _left_to(group: Path) -> int | None:
    """Return the bytes that remain to a control group; None if it has no limit."""
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is None or used is None:
        return None
    stat = group / "memory.stat"
    counts = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    files = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
    return max(limit - max(used - files, 0), 0)


def _number(path: Path) -> int | None:
    """Read a number; None if the file is absent or contains "max"."""
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)
