"""The process's own limit of open files: raised to what the system lets it have.

A shell's usual soft limit of 1024 lies below `router.max_connections`: a router would run out of
descriptors, and leave clients waiting, before it could refuse them. Owns nothing.
"""

from __future__ import annotations

import resource

MOST_FILES = 1 << 20  # where the hard limit is none


def raise_limit() -> int:
    """Raise the soft limit as far as the hard one allows; the limit afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
