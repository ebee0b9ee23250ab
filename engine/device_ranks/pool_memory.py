"""The memory of a rank's KV pool: the leader allocates it on the rank's device, the rank maps it.

The leader needs all of it: its mover registers it, READs land in it, and its checksums cover it.
Memory of a GPU travels as a handle of CUDA IPC, memory of a host (in tests) as a file descriptor.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from baton.engine.ranks.shared_memory import SharedMemory
from baton.runtime.errors import ConfigError


class SharedTensor:
    """Zero-filled bytes on `device` that another process can map."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        """Allocate the memory. Raises ConfigError if the device has not so much."""
        self._memory: SharedMemory | None = None
        try:
            if device.type == "cuda":
                self.tensor: Tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
            else:
                self._memory = SharedMemory.create(size_bytes)
                self.tensor = torch.from_numpy(self._memory.array())
        except (OSError, OverflowError, torch.OutOfMemoryError) as error:
            raise ConfigError(
                f"{device} has no memory for {size_bytes} bytes of KV: give fewer pool.blocks or a "
                "smaller pool.memory_fraction"
            ) from error

    def handle(self) -> tuple[str, list[int]]:
        """Return what another process passes to `mapped`: a text, and file descriptors."""
        if self._memory is not None:
            return json.dumps({"size_bytes": self._memory.size_bytes}), [self._memory.descriptor]
        # What torch.multiprocessing pickles; here it travels as JSON, since no pickle is read.
        found = self.tensor.untyped_storage()._share_cuda_()
        values = [each.hex() if isinstance(each, bytes) else each for each in found]
        return json.dumps({"cuda": values}), []


_BYTES_OF_CUDA = (1, 4, 6)  # indices of the handles in what `_share_cuda_` returns


def mapped(text: str, descriptors: list[int], device: torch.device) -> Tensor:
    """Map what `SharedTensor.handle` returned in the leader, as uint8 [bytes]; `device` is where it
    lies. The leader keeps it alive. Raises ConfigError if the device refuses it."""
    given: dict[str, Any] = json.loads(text)
    if "cuda" not in given:
        return torch.from_numpy(SharedMemory(descriptors[0], int(given["size_bytes"])).array())
    values = [
        bytes.fromhex(each) if index in _BYTES_OF_CUDA else each
        for index, each in enumerate(given["cuda"])
    ]
    values[0] = device.index
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*values)
    except RuntimeError as error:
        raise ConfigError(
            f"{device} cannot map the leader's KV pool ({error}): CUDA IPC needs GPUs of one host "
            "that see each other, and no expandable_segments in PYTORCH_CUDA_ALLOC_CONF"
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
