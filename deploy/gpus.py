"""How many GPUs the workers of this host can use: as many as torch sees.

`baton serve` itself loads no torch, so a child is asked, and only where torch was built for
CUDA: a host without pays nothing. Keeps no state.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from baton.runtime.errors import ConfigError

ASK_TIMEOUT_S = 120.0  # torch itself takes seconds to load, and a cold driver more
_QUESTION = (
    "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0, flush=True)"
)


def visible_gpus(device: str) -> int:
    """For workers whose `worker.device` is `device`; 0: they run on the CPU. CUDA_VISIBLE_DEVICES
    counts. Raises ConfigError where torch cannot say, or sees none that was asked for by name."""
    if device == "cpu":
        return 0
    count = _ask_torch() if built_for_cuda() else 0
    number = int(device.partition(":")[2] or 0)
    if device != "auto" and number >= count:
        raise ConfigError(
            f"worker.device is {device}: torch sees {count} GPUs on this host; check nvidia-smi, "
            "CUDA_VISIBLE_DEVICES, and that torch is a CUDA build (requirements/cuda.txt), or "
            "give --device auto or cpu"
        )
    return count


def built_for_cuda(torch_folder: Path | None = None) -> bool:
    """Whether the installed torch has its CUDA half, without loading it."""
    if torch_folder is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return False
        torch_folder = Path(spec.origin).parent
    return (torch_folder / "lib" / "libtorch_cuda.so").exists()


def _ask_torch() -> int:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _QUESTION],
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            env=os.environ,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"torch did not say within {ASK_TIMEOUT_S:g} s which GPUs there are: check nvidia-smi, "
            "or give --device cpu"
        ) from None
    words = done.stdout.split()
    if done.returncode or not words or not words[-1].isdigit():
        raise ConfigError(
            f"torch cannot say which GPUs there are ({done.stderr.strip()[-300:]}): check "
            "nvidia-smi, or give --device cpu"
        )
    return int(words[-1])
