"""The doctor's look at NIXL: READs between two processes of this host, and their transport.

Twice: over what UCX chooses by itself, and over TCP, which is what hosts without RDMA get
between each other. Children do the measuring; nothing of NIXL is loaded here.
"""

from __future__ import annotations

import asyncio
import os

from baton.deploy.doctor import Finding, Level
from baton.kv_transfer import preflight
from baton.runtime.config import HandoffConfig
from baton.runtime.errors import BatonError

TRANSPORTS_KEY = "UCX_TLS"
SLOW = (
    "KV moves slowly here: in containers share the pid namespace or allow ptrace for shared "
    "memory, give RDMA devices for the network; see UCX_TLS"
)
BROKEN = "check that nixl is installed (pip install --no-deps nixl nixl-cu13) and UCX_TLS is sane"


def transport(config: HandoffConfig) -> list[Finding]:
    """One finding for UCX's own choice, one for TCP. Takes a few seconds."""
    own = os.environ.get(TRANSPORTS_KEY)
    findings = [_measure("nixl", own, config.preflight_floor_gbps)]
    if own is None:
        findings.append(_measure("nixl over tcp", "tcp", config.preflight_floor_gbps))
    return findings


def _measure(name: str, transports: str | None, floor_gbps: float) -> Finding:
    before = os.environ.get(TRANSPORTS_KEY)
    if transports is not None:
        os.environ[TRANSPORTS_KEY] = transports
    try:
        report = asyncio.run(preflight.loopback(floor_gbps))
    except BatonError as error:
        return Finding(name, "fail", str(error), BROKEN)
    finally:
        os.environ.pop(TRANSPORTS_KEY, None)
        if before is not None:
            os.environ[TRANSPORTS_KEY] = before
    level: Level = "warn" if report.degraded else "ok"
    return Finding(name, level, report.line, SLOW if report.degraded else "")
