"""The collective operations of a worker whose ranks compute on devices of their own.

    sum         of a tensor over all ranks, in place
    broadcast   of the leader's tensor, into the other ranks' one
    gather      of all ranks' tensors, on every rank

torch.distributed carries them: NCCL between GPUs, where a graph captures them, and gloo between
CPUs, for tests. Both connect over the loopback interface, and the ranks find each other through a
file that only their user can read. A process has at most one such group.
"""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as distributed
from torch import Tensor

from baton.runtime.errors import DeviceLost

# torch 2.13 has another name for it; 2.11, which GPU machines come with, has this one alone.
warnings.filterwarnings("ignore", message=".*all_gather_into_tensor", category=FutureWarning)

JOIN_S = 120.0  # until all ranks, which have loaded, have met
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


class Collectives:
    """One rank's end of the group. All ranks must call the same operations in the same order."""

    def __init__(self, store: Path, ranks: int, rank: int, device: torch.device) -> None:
        """Join the group, and wait for all ranks to join. `store`: the group's file. Raises
        DeviceLost if they do not."""
        self.ranks, self.rank, self.device = ranks, rank, device
        self.in_order = False
        for name in _INTERFACES:
            os.environ.setdefault(name, "lo")
        on_gpu = device.type == "cuda"
        try:
            distributed.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=distributed.FileStore(str(store), ranks),  # type: ignore[attr-defined] # it is public, and not in __all__
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=JOIN_S),
                device_id=device if on_gpu else None,
            )
            distributed.barrier()
        except (RuntimeError, ValueError) as error:
            raise DeviceLost(f"rank {rank} of {ranks} cannot join its group: {error}") from error

    def sum(self, x: Tensor) -> Tensor:
        """Replace `x`, contiguous, by its sum over all ranks. With `in_order`, the sum is that of
        float32 in the order of the ranks: its bits depend on no other row of `x`."""
        if not self.in_order:
            distributed.all_reduce(x)
            return x
        parts = self.gather(x)
        total = parts[0].to(torch.float32)
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace `x`, contiguous, by the leader's."""
        distributed.broadcast(x, src=0)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return [ranks, ...]: the `x` of every rank, all of one shape and contiguous."""
        parts = torch.empty((self.ranks, *x.shape), dtype=x.dtype, device=x.device)
        distributed.all_gather_into_tensor(parts.view(-1), x.view(-1))
        return parts

    def close(self) -> None:
        """Leave the group without waiting for the others."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
