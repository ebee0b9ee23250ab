"""Counts the GPUs that the workers of this host can use: those that torch sees.

`baton serve` itself loads no torch, so a child process counts them, and only if torch was built
for CUDA and there is a driver. Keeps no state.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from baton.runtime.errors import ConfigError

DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # NVIDIA's own; WSL's
TICK_S = 0.1
ASK_TIMEOUT_S = 120.0  # torch itself takes seconds to load, and a cold driver more
_QUESTION = (
    "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0, flush=True)"
)


def visible_gpus(device: str, stopped: Callable[[], bool] = lambda: False) -> int:
    """Return how many GPUs workers with `worker.device` = `device` can use; 0: they run on the CPU,
    or `stopped` returned true. CUDA_VISIBLE_DEVICES applies. Raises ConfigError if torch cannot
    count them, or does not see the one that was named."""
    if device == "cpu":
        return 0
    count = ask_torch(stopped) if built_for_cuda() and has_driver() else 0
    if count is None:
        return 0
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


def has_driver() -> bool:
    """Whether a driver for CUDA has its device file here: containers get it with their GPUs."""
    return any(file.exists() for file in DRIVER_FILES)


def ask_torch(stopped: Callable[[], bool]) -> int | None:
    """Return the count; None if `stopped` returned true, after which the child has ended."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _QUESTION],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the terminal's Ctrl-C is for the parent
    )
    deadline = time.monotonic() + ASK_TIMEOUT_S
    with child:
        try:
            while not stopped():
                try:
                    return _counted(child, *child.communicate(timeout=TICK_S))
                except subprocess.TimeoutExpired:
                    if time.monotonic() > deadline:
                        raise ConfigError(
                            f"torch did not list the GPUs within {ASK_TIMEOUT_S:g} s: "
                            "check nvidia-smi, or give --device cpu"
                        ) from None
            return None
        finally:
            child.kill()  # of no effect on one that has ended


def _counted(child: subprocess.Popen[str], out: str, err: str) -> int:
    words = out.split()
    if child.returncode or not words or not words[-1].isdigit():
        raise ConfigError(
            f"torch cannot list the GPUs ({err.strip()[-300:]}): check nvidia-smi, or "
            "give --device cpu"
        )
    return int(words[-1])
