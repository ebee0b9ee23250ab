"""The device that a model runs on: the setting `worker.device`, checked against torch.

Keeps no state.
"""

from __future__ import annotations

import torch

from baton.runtime.config import check_device
from baton.runtime.errors import ConfigError


def chosen_device(name: str) -> torch.device:
    """Return the device called `name`: "auto" is the first GPU that torch sees, else the CPU;
    "cuda" is the first GPU, "cuda:N" the one of that number.

    Raises ConfigError for an unknown name or a missing GPU.
    """
    check_device(name)
    count = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise ConfigError(
            f"worker.device is {name}: torch {torch.__version__} sees no CUDA device here; install "
            "a CUDA build of torch (requirements/cuda.txt), check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or give cpu"
        )
    number = int(name.partition(":")[2] or 0)
    if number >= count:
        raise ConfigError(
            f"worker.device is {name}: torch sees {count} CUDA devices here, cuda:0 to "
            f"cuda:{count - 1}; give one of them, or cuda"
        )
    return torch.device("cuda", number)


def device_label(device: torch.device) -> str:
    """Return a readable name: "cpu", "cuda:0 (NVIDIA H200)"."""
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"
