"""The main module of a rank on its own device: loads a share, then runs the leader's commands.

    leader ── options ──▶ load ── "loaded" ──▶ leader; join the group; bell, arrays, compute, ...

It knows no scheduler, no sequences and no draws. It ends when the leader closes the link or ends;
one that waits in a collective operation is killed.
"""

from __future__ import annotations

import gc
import json
import socket
import sys
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.device_ranks.collectives import Collectives
from baton.engine.device_ranks.device_command import DeviceCommand
from baton.engine.device_ranks.device_rank_decoder import DeviceRankDecoder
from baton.engine.device_ranks.device_rank_group import compiling_flags, counters
from baton.engine.device_ranks.following_graphs import FollowingGraphs
from baton.engine.device_ranks.loaded_rank import LoadedDeviceRank, device_of, load_device_rank
from baton.engine.device_ranks.pool_memory import mapped
from baton.engine.execution.device_runner import graph_device
from baton.engine.memory.kv_pool import KvPool
from baton.engine.ranks.layout_arrays import from_arrays
from baton.engine.ranks.rank_link import end_with_leader, receive, refuse
from baton.engine.ranks.rank_message import BELL, SLOT_BYTES, SLOTS, read_arrays, slot_of
from baton.engine.ranks.rank_options import RankOptions
from baton.engine.ranks.shared_memory import SharedMemory
from baton.engine.scheduling.compile_clock import clock
from baton.runtime.errors import BatonError

_MAX_HANDLE_BYTES = 1 << 16


def main() -> None:
    """Serve the socket whose descriptor is the first argument."""
    end_with_leader()
    link = socket.socket(fileno=int(sys.argv[1]))
    options, descriptors = receive(link)
    if options.store is None:
        raise ValueError("the leader named no file by which its ranks find each other")
    device = device_of(options)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        try:
            loaded = load_device_rank(options)
        except BatonError as error:
            refuse(link, error)
        link.send(json.dumps({"loaded": options.rank}).encode())
        collectives = Collectives(options.store, options.ranks, options.rank, device)
        DeviceRank(link, loaded, collectives, descriptors).follow()


class DeviceRank:
    """A rank that has loaded and joined its group."""

    def __init__(
        self,
        link: socket.socket,
        loaded: LoadedDeviceRank,
        collectives: Collectives,
        descriptors: list[int],
    ) -> None:
        """`descriptors`: of the counters and of the commands' memory."""
        options = loaded.options
        self._link, self._loaded, self._collectives = link, loaded, collectives
        own = SharedMemory(descriptors[0], options.memory_bytes[0])
        self._counters = counters(own, options.ranks)
        self._compiling = compiling_flags(own, options.ranks)
        clock.watch(self._publish_compiling)
        self._commands = SharedMemory(descriptors[1], SLOTS * SLOT_BYTES).array()
        self._pool: KvPool | None = None
        self._decoder: DeviceRankDecoder | None = None
        self._graphs: FollowingGraphs | None = None

    @torch.inference_mode()
    def follow(self) -> None:
        """Carry out commands until the leader closes the socket or ends."""
        while bell := self._link.recv(BELL.size):
            command, slot, size = BELL.unpack(bell)
            arrays = read_arrays(slot_of(self._commands, slot)[:size])
            self._counters[self._loaded.options.rank] += 1
            if command == DeviceCommand.POOL:
                self._build()
            elif command == DeviceCommand.RELEASE:
                self._release()
                self._link.send(json.dumps({"released": self._loaded.options.rank}).encode())
            else:
                self._compute(DeviceCommand(command), arrays)

    def _publish_compiling(self, active: bool) -> None:
        self._compiling[self._loaded.options.rank] = active

    def _compute(self, command: DeviceCommand, arrays: list[NDArray[np.generic]]) -> None:
        decoder, graphs, pool = self._decoder, self._graphs, self._pool
        assert decoder is not None and graphs is not None and pool is not None
        device = self._loaded.device
        if command == DeviceCommand.HIDDEN:
            decoder.hidden(from_arrays(arrays).to(device))
        elif command == DeviceCommand.HIDDEN_SHORTENED:
            short = decoder.shortened(int(arrays[0][0]))
            short.hidden(from_arrays(arrays[1:]).to(device))
        elif command == DeviceCommand.LOGITS:
            shape = int(arrays[0][0]), self._loaded.whole.hidden_size
            hidden = torch.empty(shape, dtype=self._loaded.dtype, device=device)
            decoder.logits(self._collectives.broadcast(hidden))
        elif command == DeviceCommand.CAPTURE:
            graphs.capture(int(arrays[0][0]))
        elif command == DeviceCommand.REPLAY:
            graphs.replay(int(arrays[0][0]), from_arrays(arrays[1:]))
        else:
            source, target = (int(block) for block in arrays[0])
            pool.copy_block(source, target)

    def _build(self) -> None:
        """Map the pool that follows and build upon it, in place of the one before."""
        self._release()
        loaded = self._loaded
        options = RankOptions.parse(self._link.recv(_MAX_HANDLE_BYTES))
        text, descriptors, _, _ = socket.recv_fds(self._link, _MAX_HANDLE_BYTES, 1)
        try:
            memory = mapped(text.decode(), list(descriptors), loaded.device)
            self._pool = loaded.pool(options.blocks, memory)
            self._decoder, _ = loaded.decoder(self._pool, self._collectives)
            self._graphs = FollowingGraphs(
                self._decoder,
                graph_device(loaded.device),
                spare_block=self._pool.spare_block,
                max_rows=loaded.options.engine.max_rows,
                table_width=-(-loaded.context // self._pool.block_size),
            )
        except BatonError as error:
            refuse(self._link, error)
        self._link.send(json.dumps({"ready": options.rank}).encode())

    def _release(self) -> None:
        self._pool = self._decoder = self._graphs = None
        if self._loaded.device.type == "cuda":
            gc.collect()  # graphs' memory is free when they are gone
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
