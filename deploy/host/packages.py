"""Checks that the packages a worker needs are installed, before anything starts.

It looks packages up and imports none, because torch alone takes seconds. Keeps no state.
"""

from __future__ import annotations

import importlib.util

from baton.deploy.host.gpus import built_for_cuda, has_driver
from baton.runtime.errors import ConfigError

INSTALL = "pip install 'baton-serve[worker]'"
NEEDED = {  # package -> the modules of which one must be there
    "torch": ("torch",),
    "numba": ("numba",),
    "nixl": ("nixl_cu13", "nixl_cu12", "nixl"),
}


ON_CPUS = "numba"  # its kernels are Triton's on GPUs


def missing_packages(device: str = "auto") -> list[str]:
    """Return the packages that a worker on `device` needs and that are not installed."""
    gpu = device.startswith("cuda") or (device == "auto" and built_for_cuda() and has_driver())
    return [
        name
        for name, modules in NEEDED.items()
        if not any(map(installed, modules)) and not (gpu and name == ON_CPUS)
    ]


def installed(module: str) -> bool:
    """Whether a module that is part of no other could be imported."""
    return importlib.util.find_spec(module) is not None


def check_worker_packages(device: str = "auto") -> None:
    """Raise ConfigError if a package that a worker on `device` needs is not installed."""
    missing = missing_packages(device)
    if missing:
        raise ConfigError(f"workers need {' and '.join(missing)}: {INSTALL}")
