"""The Prometheus metrics of handoffs: of granters, of readers, and of prompts that need none.

The rules of `metrics` hold, which exposes them in every process.
"""

from __future__ import annotations

from baton.runtime.metric_factory import HANDOFF_STATES, counter, gauge, histogram

HANDOFFS = counter(
    "baton_handoffs_total",
    "Handoffs ended on this worker. Of the reader: completed, failed, cancelled, refused "
    "by one that drains; of the granter: closed by the reader, expired by the lease, refused.",
    "outcome", ("completed", "failed", "cancelled", "closed", "expired", "refused"),
)  # fmt: skip
OPEN_HANDOFFS = gauge(
    "baton_open_handoffs",
    "Handoffs now open on this worker, by state: waiting for the first offer, reading, or closing.",
    "state", HANDOFF_STATES,
)  # fmt: skip
OLDEST_HANDOFF_SECONDS = gauge(
    "baton_oldest_handoff_seconds",
    "Longest time since an open handoff's opening, last offer or end, by state.",
    "state", HANDOFF_STATES,
)  # fmt: skip
HANDOFF_SECONDS = histogram(
    "baton_handoff_seconds",
    "From a handoff's beginning to its last block verified; of those that were completed.",
)
HANDOFF_TAIL_SECONDS = histogram(
    "baton_handoff_tail_seconds", "From the last offer's arrival to the last block verified."
)
HANDOFF_BYTES = counter(
    "baton_handoff_bytes_total",
    "Bytes of KV that handoffs read which were completed, those read again included.",
)
READ_SECONDS = counter(
    "baton_read_seconds_total",
    "Seconds in which a completed handoff had offered blocks that had not landed.",
)
CONVERTED_BLOCKS = counter("baton_converted_blocks_total", "Blocks converted for their readers.")
REORDERED_BLOCKS = counter(
    "baton_reordered_blocks_total",
    "Blocks read from a worker with another block size, and put into the own order.",
)
CACHED_READS = counter(
    "baton_cached_reads_total",
    "Reads by prefill workers of blocks that another worker held; what is missing is computed.",
    "outcome", ("complete", "partial", "failed", "cancelled"),
)  # fmt: skip
CACHED_READ_BLOCKS = counter(
    "baton_cached_read_blocks_total", "Blocks that prefill workers read and did not compute."
)
CACHED_READ_BYTES = counter(
    "baton_cached_read_bytes_total", "Bytes of KV that prefill workers read, in vain or not."
)
LOCAL_PREFILLS = counter(
    "baton_local_prefills_total",
    "Prompts that a decode worker prefilled by itself, by why.",
    "reason", ("placed", "no_candidate", "recompute"),
)  # fmt: skip
REREAD_BLOCKS = counter(
    "baton_reread_blocks_total", "Blocks read again because their bytes were not the ones offered."
)
CHECKSUM_FAILURES = counter(
    "baton_checksum_failures_total",
    "Blocks whose bytes were not the ones offered, each time that they were read.",
)
OLDEST_CHECKSUM_SECONDS = gauge(
    "baton_oldest_checksum_seconds",
    "How long the oldest checksums have been pending: of the granter, those that its checksum "
    "thread computes; of the reader, those that a granter owes it for blocks that have landed.",
)
QUARANTINED_BLOCKS = gauge(
    "baton_quarantined_blocks", "Blocks that an unfinished READ may still write to."
)
PEERS = counter(
    "baton_peers_total",
    "Workers to read from: measured as good or degraded, taken over from another worker's "
    "measurement of the same two hosts, or to be measured later.",
    "state", ("good", "degraded", "shared", "postponed"),
)  # fmt: skip
LEASES_EXPIRED = counter(
    "baton_leases_expired_total",
    "Leases that ended by a clock: granters heard no close, or readers no acknowledgement.",
)
