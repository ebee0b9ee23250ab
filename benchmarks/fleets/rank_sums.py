"""One rank of the sums that `benchmarks.tensor_parallel` compares: started by it, once for each.

    python -m benchmarks.fleets.rank_sums RANK RANKS DESCRIPTOR PORT ROUNDS

Rank 0 prints one JSON object: median microseconds of a sum of [32, 1024] float32 numbers over the
ranks, in shared memory and by gloo over loopback. A round makes one sum each way.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as distributed

from baton.engine.ranks.shared_allreduce import SharedAllReduce
from baton.engine.ranks.shared_memory import SharedMemory

SHAPE = (32, 1024)
WARM_UP = 20


def main() -> None:
    rank, ranks, descriptor, port, rounds = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    memory = SharedMemory(descriptor, SharedAllReduce.memory_bytes(ranks))
    reduce = SharedAllReduce(memory, ranks, rank)
    seconds: dict[str, list[float]] = {"shared": [], "gloo": []}
    numbers = torch.randn(SHAPE)
    for number in range(-WARM_UP, rounds):
        for name, add in (("shared", reduce), ("gloo", distributed.all_reduce)):
            distributed.barrier()
            reduce.meet()  # so that both begin together
            took_s = timed(add, numbers.clone())
            if number >= 0:
                seconds[name].append(took_s)
    if rank == 0:
        print(json.dumps({name: 1e6 * statistics.median(each) for name, each in seconds.items()}))
    distributed.destroy_process_group()


def timed(add: Callable[[torch.Tensor], object], numbers: torch.Tensor) -> float:
    started_s = time.perf_counter()
    add(numbers)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
