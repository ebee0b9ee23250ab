"""`baton doctor`: checks whether this machine can run Baton, and names the remedies.

Each check returns a Finding about one thing, and never raises for what it looks for. `warn` means
that Baton runs, slower or smaller; `fail` means that it does not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from baton.deploy.host.instance import runtime_folder
from baton.deploy.host.packages import INSTALL, NEEDED, ON_CPUS, installed, missing_packages
from baton.engine.memory.host_memory import available_bytes
from baton.runtime.config import Config
from baton.runtime.errors import ConfigError

Level = Literal["ok", "warn", "fail"]
MIB, GIB = 1 << 20, 1 << 30
LEAST_MEMORY_BYTES = 2 * GIB
LEAST_SHARED_BYTES = GIB  # Ray's own object store; containers often give 64 MiB
LEAST_FILES = 4096
LEAST_LOCKED_BYTES = GIB  # the smallest pool worth RDMA; a larger one locks as much as it has
NIXL_INSTALL = "pip install --no-deps nixl nixl-cu13"  # else pip takes both CUDA variants


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` is empty, as `--json` prints it, where nothing is to be done."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def python() -> Finding:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", "ok", version)
    return Finding("python", "fail", version, "use Python 3.11, 3.12 or 3.13")


def system() -> Finding:
    found = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores"
    if hasattr(os, "pidfd_open"):
        return Finding("system", "ok", found)
    return Finding("system", "fail", found, "use Linux 5.3 or newer: `baton serve` needs pidfd")


def packages() -> list[Finding]:
    """The `[worker]` extra. What a router or a CPU worker can do without only warns."""
    missing = missing_packages()
    needed = [
        Finding(name, "fail", "not installed", NIXL_INSTALL if name == "nixl" else INSTALL)
        if name in missing
        else Finding(name, "ok", _version(name))
        for name in NEEDED
        if name in missing or name != ON_CPUS
    ]
    others = {
        "numba": f"{INSTALL}: workers on CPUs need it",
        "ray": "pip install ray, or use --launcher process",
        "triton": "pip install triton: kernels on GPUs need it",
    }
    return needed + [
        Finding(name, "ok", _version(name))
        if installed(name)
        else Finding(name, "warn", "not installed", remedy)
        for name, remedy in others.items()
        if name not in missing
    ]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # copied here without its metadata
        return "unknown version"


def gpu() -> Finding:
    if not installed("torch"):
        return Finding("gpu", "warn", "unknown without torch", INSTALL)
    import torch

    if torch.cuda.is_available():
        return Finding("gpu", "ok", ", ".join(map(_gpu, range(torch.cuda.device_count()))))
    if shutil.which("nvidia-smi"):
        return Finding(
            "gpu", "warn", f"a driver, but torch {torch.__version__} sees no GPU",
            "install a CUDA build of torch (requirements/cuda.txt), and check nvidia-smi",
        )  # fmt: skip
    return Finding("gpu", "ok", "none: models run on the CPU")


def _gpu(number: int) -> str:
    import torch

    free, total = torch.cuda.mem_get_info(number)
    name = torch.cuda.get_device_name(number)
    return f"cuda:{number} {name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"


def device(name: str) -> Finding:
    """Where workers will compute, and where their KV will lie."""
    if not installed("torch"):
        return Finding("device", "warn", "unknown without torch", INSTALL)
    from baton.engine.execution.device_choice import chosen_device

    try:
        chosen = chosen_device(name)
    except ConfigError as error:
        return Finding("device", "fail", f"worker.device is {name}", str(error))
    kind = "DRAM" if chosen.type == "cpu" else "VRAM"
    return Finding("device", "ok", f"worker.device is {name}: {chosen}, KV in {kind}")


def memory() -> Finding:
    available = available_bytes()
    found = f"{available / GIB:.1f} GiB available"
    if available >= LEAST_MEMORY_BYTES:
        return Finding("memory", "ok", found)
    return Finding(
        "memory", "fail", found,
        f"free at least {LEAST_MEMORY_BYTES / GIB:.0f} GiB, or raise the container's limit",
    )  # fmt: skip


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    if not folder.is_dir():
        return Finding("shared memory", "fail", f"no {folder}", f"mount a tmpfs at {folder}")
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.2f} GiB free in {folder}"
    if free >= LEAST_SHARED_BYTES:
        return Finding("shared memory", "ok", found)
    remedy = "start the container with --shm-size=2g, or use --launcher process"
    return Finding("shared memory", "warn", found, remedy)


def files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files"
    if soft >= LEAST_FILES or soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", found)
    return Finding("open files", "warn", found, f"ulimit -n {max(LEAST_FILES, min(hard, 65536))}")


def locked_memory(devices: Path = Path("/dev/infiniband")) -> Finding:
    """Check the limit of the memory that RDMA locks; without an RDMA device no limit matters."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited")
    found = f"at most {soft / MIB:.0f} MiB"
    if not any(devices.glob("uverbs*")):
        return Finding("locked memory", "ok", f"{found}, and no RDMA device that needs more")
    if soft >= LEAST_LOCKED_BYTES:
        return Finding("locked memory", "ok", f"{found}; RDMA locks the whole pool")
    return Finding(
        "locked memory", "warn", f"{found}, and RDMA locks the whole pool",
        "ulimit -l unlimited; for a unit of systemd LimitMEMLOCK=infinity, for a container "
        "--ulimit memlock=-1, for pods LimitMEMLOCK=infinity of the node's container runtime",
    )  # fmt: skip


def state_folder() -> Finding:
    try:
        return Finding("state folder", "ok", str(runtime_folder()))
    except (ConfigError, OSError) as error:
        return Finding("state folder", "fail", "not usable", str(error))


def certificates(config: Config) -> Finding:
    """Check the certificate that the settings name; without one `baton serve` issues its own."""
    security = config.security
    if security.tls == "off":
        return Finding(
            "tls", "warn", "security.tls is off: processes communicate in plain text",
            "remove this setting, unless only you can reach the network between them",
        )  # fmt: skip
    if not security.certificate:
        return Finding("tls", "ok", "on; `baton serve` makes the certificates")
    from baton.runtime.certificates import read

    try:
        found = read(security, datetime.now(UTC))
    except ConfigError as error:
        return Finding("tls", "fail", "the files of [security] do not fit", str(error))
    return Finding("tls", "ok", f"on; the certificate ends at {found.ends:%F %T} UTC")


def client_certificate(config: Config) -> list[Finding]:
    """Check the certificate for clients, if the settings name one."""
    folder = config.router.tls
    if not folder:
        return []
    from baton.runtime.certificates import read_folder

    try:
        found = read_folder(folder, "router.tls", datetime.now(UTC))
    except ConfigError as error:
        return [Finding("clients' tls", "fail", f"the files in {folder} do not fit", str(error))]
    ends = f"on; the certificate ends at {found.ends:%F %T} UTC"
    return [Finding("clients' tls", "ok", ends)]


def registry(config: Config) -> list[Finding]:
    """Check that the registry of many hosts can be read, and that each worker answers."""
    if not config.registry.location:
        return []
    from baton.deploy.cli.cluster_status import status_of
    from baton.deploy.control.orders import cluster_at
    from baton.deploy.host.cluster_secrets import read_secrets

    try:
        secrets = read_secrets(os.environ)
        status = status_of(cluster_at(config.registry, secrets, config.security))
    except ConfigError as error:
        return [Finding("registry", "fail", "its settings do not fit", str(error))]
    if status.registry_state != "readable":
        remedy = "check registry.location, its password and its certificate's authority"
        return [Finding("registry", "fail", f"{status.registry}: {status.registry_state}", remedy)]
    found = f"{status.registry}: {len(status.workers)} workers, {len(status.routers)} routers"
    if not status.warnings:
        return [Finding("registry", "ok", found)]
    return [Finding("registry", "warn", found, "; ".join(status.warnings))]


def ports(config: Config) -> list[Finding]:
    from baton.deploy.cli.port_check import ports  # it needs the Finding of this module

    return ports(config)


def nixl_transport(config: Config) -> list[Finding]:
    from baton.deploy.cli.transport_check import (
        transport,  # it needs what the checks before look for
    )

    return transport(config.handoff, config.worker.device)


def kv_transfers() -> list[Finding]:
    from baton.deploy.cli.handoff_check import kv_transfers  # it needs the Finding of this module

    return kv_transfers()


def checks(config: Config) -> list[tuple[str, Callable[[], Finding | list[Finding]]]]:
    """Name and check, the slow ones last."""
    return [
        ("python", python),
        ("system", system),
        ("packages", packages),
        ("memory", memory),
        ("shared memory", shared_memory),
        ("open files", files),
        ("locked memory", locked_memory),
        ("ports", lambda: ports(config)),
        ("state folder", state_folder),
        ("tls", lambda: certificates(config)),
        ("clients' tls", lambda: client_certificate(config)),
        ("registry", lambda: registry(config)),
        ("gpu", gpu),
        ("device", lambda: device(config.worker.device)),
        ("kv transfers", kv_transfers),
        ("nixl transport", lambda: nixl_transport(config)),
    ]


def examine(config: Config) -> Iterator[Finding]:
    """All findings, each as soon as it is known. A check that breaks is itself a finding."""
    for name, check in checks(config):
        try:
            found = check()
        except ImportError as error:
            found = Finding(name, "fail", f"{type(error).__name__}: {error}", INSTALL)
        except Exception as error:  # a package may break in any way, and that is what we look for
            found = Finding(name, "fail", f"{type(error).__name__}: {error}", "see the message")
        yield from found if isinstance(found, list) else [found]


def doctor(config: Config, *, as_json: bool) -> int:
    """Print the findings; 1 when something must be done before Baton runs."""
    findings = []
    for finding in examine(config):
        findings.append(finding)
        if not as_json:
            print(f"{finding.level:>4}  {finding.name:<15} {finding.found}", flush=True)
            if finding.remedy:
                print(f"      {'':<15} -> {finding.remedy}", flush=True)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    return 1 if any(finding.level == "fail" for finding in findings) else 0
