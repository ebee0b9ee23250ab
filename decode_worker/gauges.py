"""The gauges of a decode worker, set when its metrics are scraped, and what they count."""

from __future__ import annotations

from baton.decode_worker.handoffs import Handoffs
from baton.decode_worker.scheduler import DecodeScheduler
from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer.mover import Mover
from baton.kv_transfer.peers.grants import Grants
from baton.runtime import handoff_metrics, metrics
from baton.runtime.exposition import process_gauges


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
