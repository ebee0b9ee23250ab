"""The leader's decoder, graphs and pool, whose calls all ranks on devices carry out together.

    eager step    layout ─▶ all ranks compute ─▶ the same hidden states on each; logits gathered
    graph step    layout ─▶ ranks queue their graph ─▶ the leader queues its own, then its draw
    copy          a block ─▶ every rank copies its part

The leader alone draws. An error in the middle of a step leaves the ranks out of step, so the worker
then ends.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.engine.device_ranks.device_command import DeviceCommand
from baton.engine.device_ranks.device_rank_decoder import DeviceRankDecoder
from baton.engine.device_ranks.device_rank_group import DeviceRankGroup
from baton.engine.device_ranks.pool_memory import SharedTensor
from baton.engine.execution.cuda_runner import CudaRunner
from baton.engine.execution.decode_graph import DecodeGraphs
from baton.engine.execution.runner import ModelRunner
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.decoder import Decoder
from baton.engine.model.step_layout import StepLayout
from baton.engine.ranks.layout_arrays import to_arrays
from baton.engine.ranks.rank_group import in_step


class DeviceLeadingDecoder:
    """The decoder of all ranks, for eager steps. Only the device thread calls it."""

    def __init__(
        self,
        own: DeviceRankDecoder,
        group: DeviceRankGroup,
        device: torch.device,
        *,
        shortened: bool = False,
    ) -> None:
        """Connect the ranks. `shortened`: compute the layers of `Decoder.shortened` only, as
        many on all ranks as the leader's share needs."""
        self._own, self._group, self._device = own, group, device
        self._layers: Decoder = own.shortened() if shortened else own
        self._hidden = DeviceCommand.HIDDEN_SHORTENED if shortened else DeviceCommand.HIDDEN
        self._first = [np.array([self._layers.layers])] if shortened else []

    def hidden(self, layout: StepLayout) -> Tensor:
        """Same as `Decoder.hidden`, for a layout on the host. Raises DeviceLost if a rank has
        ended, and EngineError for a layout that is too large, before anything is computed."""
        self._group.send(self._hidden, [*self._first, *to_arrays(layout)])
        return in_step(lambda: self._layers.hidden(layout.to(self._device)))

    def logits(self, hidden: Tensor) -> Tensor:
        """Same as `Decoder.logits`. Raises like `hidden`."""
        self._group.send(DeviceCommand.LOGITS, [np.array([len(hidden)])])
        shared = self._own.collectives.broadcast
        return in_step(lambda: self._own.logits(shared(hidden.contiguous())))

    def shortened(self) -> DeviceLeadingDecoder:
        """Same as `Decoder.shortened`, on all ranks."""
        return DeviceLeadingDecoder(self._own, self._group, self._device, shortened=True)


class EagerRunner(ModelRunner):
    """`ModelRunner` whose decoder takes layouts on the host, since it sends them to the ranks."""

    def _on_device(self, layout: StepLayout) -> StepLayout:
        return layout


class FollowingRanks:
    """Implements `decode_graph.Followers`: the other ranks capture and replay with the leader."""

    def __init__(self, group: DeviceRankGroup) -> None:
        self._group = group

    def capture(self, bucket: int) -> None:
        self._group.send(DeviceCommand.CAPTURE, [np.array([bucket])])

    def replay(self, bucket: int, layout: StepLayout) -> None:
        self._group.send(DeviceCommand.REPLAY, [np.array([bucket]), *to_arrays(layout)])


class LeadingPool(KvPool):
    """The leader's KV heads of each block. The leader has allocated the memory of all ranks' pools,
    its `parts`, as `memories`."""

    group: DeviceRankGroup
    memories: tuple[SharedTensor, ...]

    def copy_block(self, source: int, target: int) -> None:
        """Same as `KvPool.copy_block`, on all ranks."""
        super().copy_block(source, target)
        self.group.send(DeviceCommand.COPY, [np.array([source, target])])


class DeviceRankRunner(CudaRunner):
    """The leader's runner; its ranks end with it."""

    def __init__(self, eager: ModelRunner, graphs: DecodeGraphs, group: DeviceRankGroup) -> None:
        super().__init__(eager, graphs)
        self.group = group

    def close(self) -> None:
        self.group.close()
