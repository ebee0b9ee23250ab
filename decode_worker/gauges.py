"""The load of a decode worker, for routers and for gauges, which are set when they are scraped."""

from __future__ import annotations

from baton.decode_worker.handoffs import Handoffs
from baton.decode_worker.requests import Requests
from baton.decode_worker.scheduler import DecodeScheduler
from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer.mover import Mover
from baton.kv_transfer.peers.grants import Grants
from baton.proto import worker_pb2
from baton.runtime import handoff_metrics, metrics
from baton.runtime.exposition import process_gauges


def load_of(pool: BlockPool, scheduler: DecodeScheduler, requests: Requests) -> worker_pb2.Load:
    """Return a load report of requests, KV and recent steps, without the worker's own state."""
    counts, steps = pool.counts(), requests.step_log
    return worker_pb2.Load(
        running=scheduler.running,
        waiting=scheduler.waiting,
        free_blocks=counts.available,
        total_blocks=counts.total,
        queued_tokens=scheduler.queued_tokens,
        queued_pairs=scheduler.queue.local_pairs + scheduler.chunks.remaining_pairs,
        pool=worker_pb2.PoolBlocks(**counts.by_state()),
        promised_blocks=scheduler.promised_blocks,
        waiting_blocks=scheduler.queue.wanted_blocks,
        completed_requests=requests.served,
        open_requests=len(requests.living()),
        active_requests=scheduler.active_requests,
        chunk_step=steps.last(chunks=True),
        decode_step=steps.last(chunks=False),
    )


def publish(
    pool: BlockPool, mover: Mover, scheduler: DecodeScheduler, handoffs: Handoffs, grants: Grants
) -> None:
    process_gauges.set_pool_gauges(pool.counts().by_state(), scheduler.promised_blocks)
    oldest_s = max(mover.oldest_checksum_s(), handoffs.oldest_unverified_s())
    handoff_metrics.OLDEST_CHECKSUM_SECONDS.set(oldest_s)
    process_gauges.set_handoff_gauges([*handoffs.ages(), *grants.ages()])
    metrics.RUNNING_REQUESTS.set(scheduler.active_requests)
    metrics.WAITING_REQUESTS.set(scheduler.waiting)
    metrics.QUEUED_TOKENS.set(scheduler.queued_tokens)
    metrics.PROMISED_BLOCKS.set(scheduler.promised_blocks)


def spare_blocks(pool: BlockPool, scheduler: DecodeScheduler, converted: bool) -> int:
    """Return the blocks that are neither held nor promised, of which a grant may pin some. One that
    is `converted` takes further blocks: there are none while a request waits."""
    if converted and scheduler.waiting:
        return 0
    return pool.available - scheduler.promised_blocks
