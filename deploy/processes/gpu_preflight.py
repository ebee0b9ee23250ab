"""The preflight's pools in a GPU's memory: READs between two processes on one GPU.

    python -m baton.deploy.processes.gpu_preflight --device cuda:0          prints one line

The preflight itself (kv_transfer/preflight.py) knows no tensors; here they are made for it.
"""

from __future__ import annotations

import argparse
import secrets
from functools import partial

from baton.kv_transfer.nixl_mover import NixlMover
from baton.kv_transfer.preflight import Processes, add_arguments, run
from baton.runtime.errors import ConfigError


def gpu_mover(device: str, blocks: int, block_bytes: int) -> NixlMover:
    """A mover on a pool of its own there. Block i is filled with bytes i + 1 (mod 256). Raises
    ConfigError for what is no GPU or not there, or whose memory NIXL cannot register."""
    import torch

    from baton.deploy.processes.pool_memory import device_pool
    from baton.engine.execution.device_choice import chosen_device

    where = chosen_device(device)
    if where.type != "cuda":
        raise ConfigError(
            f"--device is {device}, which is no GPU here: give cuda or cuda:N, or measure this "
            "host's memory with python -m baton.kv_transfer.preflight"
        )
    with torch.cuda.device(where):
        numbers = torch.arange(1, blocks + 1, device=where).to(torch.uint8)
        pool = numbers.repeat_interleave(block_bytes).view(blocks, block_bytes)
        torch.cuda.synchronize(where)
        return NixlMover(device_pool(pool, 1), secrets.token_bytes(16))


def on_gpu(device: str) -> Processes:
    """Both ends of a preflight on that GPU."""
    own = ("-m", "baton.deploy.processes.gpu_preflight", "--device", device)
    return Processes(own, partial(gpu_mover, device))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure READs between processes on one GPU")
    parser.add_argument("--device", required=True, metavar="cuda:N")
    add_arguments(parser)
    arguments = parser.parse_args()
    run(arguments, on_gpu(arguments.device))


if __name__ == "__main__":
    main()
