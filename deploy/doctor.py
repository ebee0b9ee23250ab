"""`baton doctor`: can this machine run Baton, and if not, what to do about it.

Each check looks at one thing and answers a Finding; it never raises for what it is there to
find. `warn` means that Baton runs, slower or smaller; `fail` means that it does not.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from baton.deploy.instance import runtime_folder
from baton.deploy.serve import check_port
from baton.runtime.config import Config, RouterConfig
from baton.runtime.errors import BatonError, ConfigError

Level = Literal["ok", "warn", "fail"]
GIB = 1 << 30
LEAST_MEMORY_BYTES = 2 * GIB
LEAST_SHARED_BYTES = GIB  # Ray's own object store; containers often give 64 MiB
LEAST_FILES = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` is empty where nothing is to be done."""

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
    return Finding("system", "fail", found, "use Linux 5.3 or newer: keepers need pidfd")


def packages() -> list[Finding]:
    """The `[worker]` extra. What a router or a CPU worker can do without only warns."""
    consequences: dict[str, tuple[Level, str]] = {
        "torch": ("fail", "pip install 'baton-serve[worker]'"),
        "safetensors": ("fail", "pip install 'baton-serve[worker]'"),
        "nixl": ("fail", "pip install --no-deps nixl nixl-cu13"),
        "numba": ("warn", "pip install numba: decoding on CPU is several times slower without"),
        "ray": ("warn", "pip install ray, or use --launcher process"),
        "triton": ("warn", "pip install triton: kernels on GPUs need it"),
    }
    return [_package(name, *rest) for name, rest in consequences.items()]


def _package(name: str, level: Level, remedy: str) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, level, "not installed", remedy)


def gpu() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("gpu", "warn", "unknown without torch", "install torch first")
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
    if importlib.util.find_spec("torch") is None:
        return Finding("device", "warn", "unknown without torch", "install torch first")
    from baton.engine.device_choice import chosen_device

    try:
        chosen = chosen_device(name)
    except ConfigError as error:
        return Finding("device", "fail", f"worker.device is {name}", str(error))
    kind = "DRAM" if chosen.type == "cpu" else "VRAM"
    return Finding("device", "ok", f"worker.device is {name}: {chosen}, KV in {kind}")


def memory() -> Finding:
    available = available_memory_bytes()
    found = f"{available / GIB:.1f} GiB available"
    if available >= LEAST_MEMORY_BYTES:
        return Finding("memory", "ok", found)
    return Finding(
        "memory", "fail", found,
        f"free at least {LEAST_MEMORY_BYTES / GIB:.0f} GiB, or raise the container's limit",
    )  # fmt: skip


def available_memory_bytes() -> int:
    """What the kernel can give, or what is left of the container's limit where that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists():
        text = limit.read_text().strip()
        if text != "max":
            available = min(available, int(text) - int(used.read_text()))
    return available


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


def port(router: RouterConfig) -> Finding:
    try:
        check_port(router)
    except ConfigError as error:
        return Finding("port", "fail", f"{router.host}:{router.port} is taken", str(error))
    return Finding("port", "ok", f"{router.host}:{router.port} is free")


def state_folder() -> Finding:
    try:
        return Finding("state folder", "ok", str(runtime_folder()))
    except (ConfigError, OSError) as error:
        return Finding("state folder", "fail", "not usable", str(error))


def checks(config: Config) -> list[tuple[str, Callable[[], Finding | list[Finding]]]]:
    """Name and check, the slow ones last."""
    from baton.deploy.transport_check import transport

    return [
        ("python", python),
        ("system", system),
        ("packages", packages),
        ("memory", memory),
        ("shared memory", shared_memory),
        ("open files", files),
        ("port", lambda: port(config.router)),
        ("state folder", state_folder),
        ("gpu", gpu),
        ("device", lambda: device(config.worker.device)),
        ("nixl transport", lambda: transport(config.handoff, config.worker.device)),
    ]


def examine(config: Config) -> Iterator[Finding]:
    """All findings, each as soon as it is known. A check that breaks is itself a finding."""
    for name, check in checks(config):
        try:
            found = check()
        except (BatonError, OSError, ImportError, LookupError, ValueError, RuntimeError) as error:
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
