"""The five dashboards: which panels they have, and what each asks Prometheus."""

from __future__ import annotations

from baton.deploy.monitoring.panels import Dashboard, Panel, Query
from baton.deploy.monitoring.rules import by_role, rate, series

SECONDS, RATIO, BYTES_PER_S = "s", "percentunit", "Bps"


def _recorded(
    title: str, meaning: str, record: str, legend: str = "", unit: str = "short"
) -> Panel:
    return Panel(title, meaning, (Query(series(record), legend),), unit)


def _counted(
    title: str, meaning: str, metric: str, label: str | None = None, unit: str = "short"
) -> Panel:
    """Return a panel of a counter's rate, by one of its labels."""
    return Panel(title, meaning, (_summed(rate(metric), label),), unit)


def _shown(
    title: str, meaning: str, metric: str, label: str | None = None, unit: str = "short"
) -> Panel:
    """Return a panel of a gauge, summed by one of its labels."""
    return Panel(title, meaning, (_summed(series(metric), label),), unit)


def _summed(expr: str, label: str | None) -> Query:
    if label is None:
        return Query(f"sum ({expr})")
    return Query(f"sum by ({label}) ({expr})", f"{{{{{label}}}}}")


def _quantiles(title: str, meaning: str, metric: str, by: str | None = None) -> Panel:
    labels = "le" if by is None else f"le, {by}"
    legend = "" if by is None else f" {{{{{by}}}}}"
    return Panel(
        title,
        meaning,
        tuple(
            Query(
                f"histogram_quantile({share}, sum by ({labels}) ({rate(metric + '_bucket')}))",
                f"{name}{legend}",
            )
            for share, name in ((0.5, "p50"), (0.99, "p99"))
        ),
        SECONDS,
    )


def _recorded_quantiles(title: str, meaning: str, record: str) -> Panel:
    queries = tuple(Query(series(f"{record}:{name}"), name) for name in ("p50", "p99"))
    return Panel(title, meaning, queries, SECONDS)


FLEET = Dashboard(
    "fleet",
    "fleet",
    "Do clients get what they may expect, and at what cost?",
    (
        _recorded_quantiles("TTFT", "Arrival to first token.", "baton:ttft_seconds"),
        _recorded_quantiles("ITL", "Between two tokens of a choice.", "baton:itl_seconds"),
        _recorded("Goodput", "Share of requests that meet both objectives of [slo].",
                  "baton:goodput:ratio", unit=RATIO),
        _recorded("Requests", "Ended requests a second.", "baton:requests:rate", "{{outcome}}"),
        Panel(
            "Output tokens a second",
            "All that workers drew, and those of requests that met their objectives.",
            (Query(series("baton:output_tokens:rate"), "all"),
             Query(series("baton:goodput_tokens:rate"), "goodput")),
        ),
        _recorded("Cost of a million output tokens", "From slo.price_per_hour of all workers.",
                  "baton:cost_per_million_tokens"),
        _recorded("Workers", "Processes by role.", "baton:workers:count", "{{role}}"),
        _counted("Objectives", "Requests by what they missed.",
                 "baton_objective_requests_total", "outcome"),
        _counted("Refusals", "Refused requests by reason.", "baton_refusals_total", "reason"),
        _shown("Active requests", "Requests that hold an admission ticket.",
               "baton_active_requests"),
        _quantiles("Request time", "Arrival to end.", "baton_request_seconds"),
        _counted("Finish reasons", "Choices a second that were answered to their end.",
                 "baton_finished_choices_total", "reason"),
        _quantiles("Tokenization", "From the body to tokens.", "baton_tokenize_seconds"),
    ),
)  # fmt: skip

POOL_RATIO = Dashboard(
    "pool-ratio",
    "pool ratio",
    "Are there too many workers of one role, and too few of the other?",
    (
        _recorded("Utilisation", "Share of time in which a device computes.",
                  "baton:utilisation:ratio", "{{role}}", RATIO),
        _recorded("Queue", "Prompt tokens still to be computed, with the rest of prompts in "
                  "chunks.", "baton:queued_tokens:sum", "{{role}}"),
        _recorded("KV use", "Share of the blocks that no allocation could get.",
                  "baton:kv_use:ratio", "{{role}}", RATIO),
        _recorded("Waiting requests", "For credit, for blocks, or on a router for a worker.",
                  "baton:waiting_requests:sum", "{{role}}"),
        Panel("Time in the queue", "p99, from receipt to admission.", (Query(
            f"histogram_quantile(0.99, sum by (le, role) ({rate('baton_queue_seconds_bucket')}"
            " * on (job, instance) group_left (role) (baton_role{$SELECT} == 1)))",
            "{{role}}"),), SECONDS),
        _shown("Credit", "Blocks that are granted and not yet allocated.",
               "baton_promised_blocks"),
        _recorded("Disaggregated", "Share of the placements on a prefill worker.",
                  "baton:disaggregated:ratio", unit=RATIO),
        Panel("Decisions", "Placements by reason.", (Query(
            f"sum by (decision, reason) ({rate('baton_disaggregation_decisions_total')})",
            "{{decision}}: {{reason}}"),)),
        _counted("Local prefills", "Prompts computed on decode workers, by why.",
                 "baton_local_prefills_total", "reason"),
        _recorded("Prefix hits", "Share of the prompt tokens that were cached.",
                  "baton:prefix_hit:ratio", "{{role}}", RATIO),
        _shown("Fleet's queue, as routers see it", "Prompt tokens, from load reports.",
               "baton_fleet_queued_tokens", "role"),
        Panel("Running requests", "Beyond the queue.", (
            Query(by_role(series("baton_running_requests")), "{{role}}"),)),
    ),
)  # fmt: skip

HANDOFF = Dashboard(
    "handoff",
    "handoffs",
    "Does KV move, how fast, and how much of it does a client wait for?",
    (
        _shown("Open handoffs", "By state, at both ends.", "baton_open_handoffs", "state"),
        Panel("Oldest handoff", "Age by state.", (Query(
            f"max by (state) ({series('baton_oldest_handoff_seconds')})", "{{state}}"),), SECONDS),
        _counted("Ended handoffs", "A second, by outcome.", "baton_handoffs_total", "outcome"),
        _recorded("KV moved", "Bytes a second over the fleet.", "baton:handoff_bytes:rate",
                  unit=BYTES_PER_S),
        _recorded("Bandwidth of READs", "Bytes over the time in which a handoff reads.",
                  "baton:read_bandwidth:bytes_per_second", unit=BYTES_PER_S),
        _recorded_quantiles("Exposed transfer", "Last offer to last block verified.",
                            "baton:exposed_transfer_seconds"),
        _quantiles("Whole handoff", "Opening to last block verified.", "baton_handoff_seconds"),
        _counted("Wrong checksums", "Blocks that were read again.",
                 "baton_checksum_failures_total"),
        _counted("Expired leases", "By a clock of either end.", "baton_leases_expired_total"),
        _shown("Degraded pairs", "Below the floor of bandwidth.", "baton_degraded_pairs"),
        _shown("Quarantined blocks", "An unfinished READ may still write to them.",
               "baton_quarantined_blocks"),
        Panel("Oldest checksums", "How long they have been pending.", (Query(
            f"max by (instance) ({series('baton_oldest_checksum_seconds')})", "{{instance}}"),),
            SECONDS),
    ),
)  # fmt: skip

ENGINE = Dashboard(
    "engine",
    "engine",
    "What do the devices do with their time and their memory?",
    (
        _quantiles("Step", "Device time of a step.", "baton_step_seconds", "role"),
        _counted("Steps a second", "By role.", "baton_step_seconds_count", "role"),
        Panel("Sequences of a step", "Mean.", (Query(
            f"sum({rate('baton_step_sequences_sum')}) / sum({rate('baton_step_sequences_count')})",
        ),)),
        _counted("Tokens a second", "Prompt, output and computed again.", "baton_tokens_total",
                 "kind"),
        _counted("Preemptions", "What was put back because blocks ran out.",
                 "baton_preemptions_total", "kind"),
        _shown("Blocks", "Of all pools, by state.", "baton_pool_blocks", "state"),
        Panel("Acceptance", "Accepted over proposed tokens, by proposer.", (Query(
            f"sum by (proposer) ({rate('baton_accepted_tokens_total')})"
            f" / sum by (proposer) ({rate('baton_proposed_tokens_total')})", "{{proposer}}"),),
            RATIO),
        _counted("Memory shortages", "Steps that were divided.", "baton_memory_shortages_total"),
        _counted("Broken slices", "Numbers that were not finite.", "baton_broken_slices_total"),
        _counted("Waits for masks", "Seconds of draws, a second.",
                 "baton_mask_wait_seconds_total", unit=SECONDS),
        Panel("Memory", "Resident, by process.", (Query(
            series("process_resident_memory_bytes"), "{{instance}}"),), "bytes"),
        Panel("CPU", "Cores, by process.", (Query(
            rate("process_cpu_seconds_total"), "{{instance}}"),)),
    ),
)  # fmt: skip

RELIABILITY = Dashboard(
    "reliability",
    "reliability",
    "What fails, what recovers from it, and is it getting worse?",
    (
        _counted("Migrations", "Requests that went on at another worker, by why.",
                 "baton_migrations_total", "reason"),
        _counted("Retries refused", "Attempts or budget used up.",
                 "baton_retries_refused_total", "reason"),
        _counted("Hangs", "Workers without a step in time, by role.", "baton_hangs_total", "role"),
        _shown("Circuits", "Workers by state.", "baton_circuits", "state"),
        _counted("Circuits opened", "By why.", "baton_circuits_opened_total", "reason"),
        _shown("Links", "By the other end's role.", "baton_links", "peer"),
        _shown("Ready workers", "Linked, and take work.", "baton_fleet_ready_workers", "role"),
        _counted("Lost links", "By error or silence.", "baton_link_breaks_total"),
        _counted("Deadlines passed", "By phase.", "baton_deadlines_passed_total", "phase"),
        Panel("Registry", "1: usable.", (Query(
            f"min by (instance) ({series('baton_registry_up')})", "{{instance}}"),)),
        Panel("Missing workers", "Kept by baton fleet and not registered, by role.", (Query(
            f"sum by (role) ({series('baton_wanted_workers')})"
            f" - sum by (role) ({series('baton_registered_workers')})", "{{role}}"),)),
        _counted("Worker restarts", "On Ray's nodes, by why.",
                 "baton_worker_restarts_total", "reason"),
        _shown("Ray nodes", "Living ones, the head included.", "baton_ray_nodes"),
        _counted("Requests quarantined", "Workers hung on them.",
                 "baton_requests_quarantined_total"),
        _counted("Stale outputs", "Dropped: of older attempts.", "baton_stale_outputs_total"),
        Panel("Uptime", "By process.", (Query(
            f"time() - {series('process_start_time_seconds')}", "{{instance}}"),), SECONDS),
    ),
)  # fmt: skip

DASHBOARDS = (FLEET, POOL_RATIO, HANDOFF, ENGINE, RELIABILITY)
