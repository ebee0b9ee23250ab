"""Loads a model folder into an engine that splits the model over the GPUs of one host.

    ranks start to load ─▶ rank 0 loads here ─▶ all join the group ─▶ pools ─▶ graphs, together

Each rank has a process, a GPU and a KV pool of its own KV heads. The leader, rank 0, allocates all
pools, so that one mover reads and offers whole blocks; see docs/decisions/0130-ranks-on-gpus.md.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from baton.engine.checkpoint.shards import Progress
from baton.engine.device_ranks.collectives import Collectives
from baton.engine.device_ranks.device_command import DeviceCommand
from baton.engine.device_ranks.device_rank_group import COUNTER_BYTES, DeviceRankGroup
from baton.engine.device_ranks.leading import (
    DeviceLeadingDecoder,
    DeviceRankRunner,
    EagerRunner,
    FollowingRanks,
    LeadingPool,
)
from baton.engine.device_ranks.loaded_rank import LoadedDeviceRank, device_of, load_device_rank
from baton.engine.device_ranks.pool_memory import SharedTensor
from baton.engine.execution.decode_graph import BUCKETS
from baton.engine.execution.device_runner import decode_graphs
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.gpu_loading import CudaMemory, DeviceMemory, sized_runner
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.memory.kv_pool import KvPool, block_bytes
from baton.engine.memory.memory_plan import PoolForm
from baton.engine.ranks.rank_message import SLOT_BYTES, SLOTS
from baton.engine.ranks.rank_options import RankOptions
from baton.engine.ranks.shared_memory import SharedMemory
from baton.engine.spec.model_spec import read_spec
from baton.engine.spec.rank_split import RankSplit, check_split, spec_of_rank
from baton.runtime.errors import ConfigError, DeviceLost

Stalls: TypeAlias = dict[int, tuple[int, int]]  # by rank: commands that it has read, polls since

_WATCH_S = 0.1
_HUNG_S = 2.0  # in which a rank that compiles nothing reads none of the commands that wait
HUNG_POLLS = round(_HUNG_S / _WATCH_S)  # time in which this process is stopped has none


def build_device_rank_engine(
    folder: Path,
    ranks: int,
    options: EngineOptions,
    progress: Progress | None = None,
    *,
    ep: int = 1,
    lost: Callable[[str], None],
) -> TorchEngine:
    """Start the ranks on the GPUs from `options.device` on, load the model of `folder` on all of
    them, and start the leader's device thread. `lost` is called, in a thread of its own, with the
    reason when a rank has ended or stands still: the leader's device may wait for it for ever.

    Raises ConfigError and ModelError like `build_engine`, also for errors of a rank, and
    ConfigError for a number of ranks or of groups that does not fit, or for too few GPUs.
    """
    device = torch.device(options.device)
    first, there = device.index or 0, torch.cuda.device_count()
    if first + ranks > there:
        raise ConfigError(
            f"worker.tp is {ranks} and worker.device {options.device}: this process sees {there} "
            f"GPUs; give at most {max(there - first, 1)} ranks, or show it more GPUs "
            "(CUDA_VISIBLE_DEVICES)"
        )
    options = replace(options, device=f"cuda:{first}")
    with torch.cuda.device(first):
        runner = build_device_rank_runner(folder, ranks, options, progress, ep=ep)
        watch(runner.group, lost)
        costs = runner.measure_draws()
    return TorchEngine(
        runner, threads=options.threads, device=torch.device("cuda", first), draw_costs=costs
    )


def build_device_rank_runner(
    folder: Path,
    ranks: int,
    options: EngineOptions,
    progress: Progress | None = None,
    *,
    ep: int = 1,
    memory: DeviceMemory | None = None,
    buckets: Sequence[int] = BUCKETS,
) -> DeviceRankRunner:
    """Same as `build_device_rank_engine`, for a caller that runs steps in its own thread. `memory`
    of the devices (None: that of the GPUs), and `buckets` to capture, are for tests."""
    if options.draft_folder is not None:
        raise ConfigError(
            f"worker.tp is {ranks} on {options.device}: {options.draft_label} in "
            f"{options.draft_folder} runs on a CPU only; speculate by ngram or suffix"
        )
    whole = read_spec(folder, options.max_context)
    check_split(whole, ranks, ep)
    meeting = tempfile.TemporaryDirectory(prefix="baton-ranks-")  # of this user alone
    sizes = COUNTER_BYTES, SLOTS * SLOT_BYTES
    store = Path(meeting.name) / "group"
    mine = RankOptions(0, ranks, folder, options, ep, memory_bytes=sizes, store=store)
    group = DeviceRankGroup(mine, [SharedMemory.create(size) for size in sizes], meeting)
    try:
        loaded = load_device_rank(mine, progress)
        group.wait_loaded()
        collectives = Collectives(store, ranks, 0, loaded.device)
        group.joined = collectives
        leader = _Leader(loaded, group, collectives, buckets)
        return leader.runner(memory or GroupMemory(mine, group))
    except BaseException:  # an interrupted load leaves no rank behind
        group.close()
        raise


class GroupMemory(CudaMemory):
    """The memory of the ranks' GPUs: each has to hold what the fullest one can."""

    def __init__(self, options: RankOptions, group: DeviceRankGroup) -> None:
        super().__init__(device_of(options, 0))
        self._devices = [device_of(options, rank) for rank in range(options.ranks)]
        self._group = group

    def free(self) -> int:
        torch.cuda.synchronize(self._devices[0])
        return min(int(torch.cuda.mem_get_info(device)[0]) for device in self._devices)

    def release(self) -> None:
        self._group.release()
        super().release()
        torch.cuda.ipc_collect()


class _Leader:
    """Builds the leader's pool and runner, together with all ranks."""

    def __init__(
        self,
        loaded: LoadedDeviceRank,
        group: DeviceRankGroup,
        collectives: Collectives,
        buckets: Sequence[int],
    ) -> None:
        self._loaded, self._group, self._collectives = loaded, group, collectives
        self._buckets = buckets

    def runner(self, memory: DeviceMemory) -> DeviceRankRunner:
        loaded = self._loaded
        options, weights_bytes = loaded.options.engine, memory.held()
        memory.release()
        form = PoolForm(loaded.spec, options.block_size, loaded.dtype, options.kv_quant)
        found = sized_runner(form, options, self._pool, self._build, memory, weights_bytes)
        assert isinstance(found, DeviceRankRunner)
        if (proven := found.eager.numerics) is not None:
            found.eager.numerics = loaded.options.numerics(proven)
        return found

    def _pool(self, blocks: int) -> KvPool:
        """Allocate the pools of all ranks, and have each rank build upon its own."""
        loaded, options = self._loaded, self._loaded.options
        engine = options.engine
        each = block_bytes(loaded.spec, engine.block_size, loaded.dtype, engine.kv_quant)
        size_bytes = (blocks + 1) * each  # with the spare block
        ranks = range(options.ranks)
        memories = tuple(SharedTensor(size_bytes, device_of(options, rank)) for rank in ranks)
        pools = [
            LeadingPool(
                spec_of_rank(loaded.whole, RankSplit(options.ranks, rank, options.ep)),
                blocks,
                engine.block_size,
                loaded.dtype,
                device_of(options, rank),
                engine.kv_quant,
                memory=memories[rank].tensor,
            )
            for rank in ranks
        ]
        self._group.send(DeviceCommand.POOL)
        given = replace(options, blocks=blocks)
        self._group.give_pools(given, [memory.handle() for memory in memories[1:]])
        own = pools[0]
        own.group, own.parts, own.memories = self._group, tuple(pools), memories
        return own

    def _build(self, pool: KvPool) -> DeviceRankRunner:
        loaded, whole = self._loaded, self._loaded.whole
        decoder, kernels = loaded.decoder(pool, self._collectives)
        leading = DeviceLeadingDecoder(decoder, self._group, loaded.device)
        engine = loaded.options.engine
        eager = EagerRunner(whole, pool, leading, engine.max_context, kernels.sampler)
        followers = FollowingRanks(self._group)
        graphs = decode_graphs(
            decoder, pool, whole.vocab_size, engine.max_rows, loaded.context, followers
        )
        graphs.capture(self._buckets)
        return DeviceRankRunner(eager, graphs, self._group)


def watch(group: DeviceRankGroup, lost: Callable[[str], None]) -> None:
    """Call `lost` once a rank of `group` has ended or stands still, until the group is closed."""

    def poll() -> None:
        stalls: Stalls = {}
        while not group.closed.wait(_WATCH_S):
            stalls = counted_stalls(stalls, group.behind())
            try:
                group.check()
                for rank, (_, polls) in stalls.items():
                    if polls > HUNG_POLLS:
                        raise DeviceLost(f"rank {rank} has read no command for {_HUNG_S:g} s")
            except DeviceLost as error:
                lost(str(error))
                return

    threading.Thread(target=poll, name="ranks", daemon=True).start()


def counted_stalls(before: Stalls, behind: dict[int, int]) -> Stalls:
    """Return how many commands each rank has read that is `behind`, and for how many polls it has
    read no other."""
    found = {}
    for rank, read in behind.items():
        known, polls = before.get(rank, (read, -1))
        found[rank] = (read, polls + 1 if known == read else 0)
    return found
