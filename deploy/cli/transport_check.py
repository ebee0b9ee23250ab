"""The doctor's look at NIXL: READs between two processes of this host, and their transport.

Over what UCX chooses by itself, and over TCP, which is what hosts without RDMA get between each
other; then on each GPU that workers may use. Children do the measuring; nothing of NIXL is
loaded here.
"""

from __future__ import annotations

import asyncio
import os

from baton.deploy.cli.doctor import Finding, Level
from baton.deploy.host.gpus import visible_gpus
from baton.deploy.host.packages import INSTALL, ON_CPUS, installed, missing_packages
from baton.deploy.processes import gpu_preflight
from baton.kv_transfer import preflight
from baton.runtime.config import HandoffConfig
from baton.runtime.errors import BatonError, ConfigError

TRANSPORTS_KEY = "UCX_TLS"
SLOW = (
    "KV transfers are slow here: in containers share the pid namespace or allow ptrace for shared "
    "memory, pass RDMA devices through for the network; see UCX_TLS"
)
BROKEN = (
    "check that nixl is installed (pip install --no-deps nixl nixl-cu13) and that UCX_TLS names "
    "transports of this host"
)


SLOW_GPU = (
    "KV transfers between processes on this GPU are slow: in containers share the ipc and pid "
    "namespaces; UCX_TLS, where it is set, must name cuda_ipc and cuda_copy"
)
BROKEN_GPU = (
    "check UCX_TLS (cuda_ipc, cuda_copy) and that nixl was built with CUDA, or serve with "
    "--device cpu"
)


def transport(config: HandoffConfig, device: str = "cpu") -> list[Finding]:
    """One finding for UCX's own choice, one for TCP, one for each GPU that `worker.device`
    allows. Takes a few seconds."""
    return _of_hosts(config, device) + [
        _measure_gpu(name, config.preflight_floor_gb_per_s) for name in _gpus(device)
    ]


def _of_hosts(config: HandoffConfig, device: str) -> list[Finding]:
    if not installed(ON_CPUS):  # workers on GPUs alone do without
        level: Level = "fail" if ON_CPUS in missing_packages(device) else "warn"
        return [
            Finding(
                "nixl transport",
                level,
                "without numba there are no checksums in host memory",
                INSTALL,
            )
        ]
    own = os.environ.get(TRANSPORTS_KEY)
    findings = [_measure("nixl transport", own, config.preflight_floor_gb_per_s)]
    if own is None:
        findings.append(_measure("nixl over tcp", "tcp", config.preflight_floor_gb_per_s))
    return findings


def _gpus(device: str) -> list[str]:
    try:
        count = visible_gpus(device)
    except ConfigError:
        return []  # the finding on the device reports it
    return [device] if ":" in device else [f"cuda:{number}" for number in range(count)]


def _measure_gpu(device: str, floor_gb_per_s: float) -> Finding:
    name = f"nixl on {device}"
    try:
        report = asyncio.run(preflight.loopback(floor_gb_per_s, gpu_preflight.on_gpu(device)))
    except BatonError as error:
        return Finding(name, "fail", str(error), BROKEN_GPU)
    if report.degraded:
        return Finding(name, "warn", report.line, SLOW_GPU)
    return Finding(name, "ok", report.line)


def _measure(name: str, transports: str | None, floor_gb_per_s: float) -> Finding:
    before = os.environ.get(TRANSPORTS_KEY)
    if transports is not None:
        os.environ[TRANSPORTS_KEY] = transports
    try:
        report = asyncio.run(preflight.loopback(floor_gb_per_s))
    except BatonError as error:
        return Finding(name, "fail", str(error), BROKEN)
    finally:
        os.environ.pop(TRANSPORTS_KEY, None)
        if before is not None:
            os.environ[TRANSPORTS_KEY] = before
    level: Level = "warn" if report.degraded else "ok"
    return Finding(name, level, report.line, SLOW if report.degraded else "")
