"""Which packages a worker cannot start without, and whether they are here.

Asked before anything starts, so that what is missing is named at once. Looks packages up and
imports none: torch alone takes seconds. Keeps no state.
"""

from __future__ import annotations

import importlib.util

from baton.deploy.host.gpus import built_for_cuda, driver_there
from baton.runtime.errors import ConfigError

INSTALL = "pip install 'baton-serve[worker]'"
NEEDED = {  # package -> the modules of which one must be there
    "torch": ("torch",),
    "numba": ("numba",),
    "nixl": ("nixl_cu13", "nixl_cu12", "nixl"),
}


ON_CPUS = "numba"  # its kernels are Triton's on GPUs


def missing_packages(device: str = "auto") -> list[str]:
    """Those that a worker on `device` cannot start without and that are not installed."""
    gpu = device.startswith("cuda") or (device == "auto" and built_for_cuda() and driver_there())
    return [
        name
        for name, modules in NEEDED.items()
        if not any(map(installed, modules)) and not (gpu and name == ON_CPUS)
    ]


def installed(module: str) -> bool:
    """Whether a module that is part of no other could be imported."""
    return importlib.util.find_spec(module) is not None


def check_worker_packages(device: str = "auto") -> None:
    """Raise ConfigError where this installation can route but not compute on `device`."""
    missing = missing_packages(device)
    if missing:
        raise ConfigError(f"workers need {' and '.join(missing)}: {INSTALL}")
