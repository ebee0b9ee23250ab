"""The recording rules and alerts for Prometheus: one source for a plain server and for the chart.

`$SELECT` in an expression stands for the label matchers of one release; a plain Prometheus, which
scrapes one fleet, needs none. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass

SELECT = "$SELECT"
_ROLE = f"on (job, instance) group_left (role) (baton_role{{{SELECT}}} == 1)"
_WORKER_ROLE = f'on (job, instance) group_left (role) (baton_role{{{SELECT},role!="router"}} == 1)'
_USED = 'state!~"free|cached"'
_OFFERED = 'state!="waiting"'
_OUTPUT = 'kind="output"'
_MET, _FAILED = 'outcome="met"', 'outcome="failed"'
_DISAGGREGATED = 'decision="disaggregated"'
_MOVED = 'outcome="moved"'
_TO_MOVE = 'outcome!~"moved|short|cached"'  # as `baton doctor` judges
_PREFILL, _DECODE = 'peer="prefill"', 'peer="decode"'
_DECODE_ROLE, _ROUTER_ROLE = 'role="decode"', 'role="router"'
_PREFILL_ROLE = 'role="prefill"'


@dataclass(frozen=True, slots=True)
class Recording:
    """A series that Prometheus computes; dashboards and alerts read it."""

    record: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert: it fires once `expr` has held for `lasts`."""

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str
    runbook: str | None = None


def rate(metric: str, matchers: str = "", window: str = "2m") -> str:
    return f"rate({series(metric, matchers)}[{window}])"


def series(metric: str, matchers: str = "") -> str:
    inner = f"{SELECT},{matchers}" if matchers else SELECT
    return f"{metric}{{{inner}}}"


def _most_of_15m(metric: str, matchers: str = "") -> str:
    return f"max_over_time({series(metric, matchers)}[15m])"


def by_role(expr: str) -> str:
    """Return the sum over each role, of a metric that has no label for it."""
    return f"sum by (role) ({expr} * {_ROLE})"


def by_worker_role(expr: str) -> str:
    """Same as `by_role`, without routers."""
    return f"sum by (role) ({expr} * {_WORKER_ROLE})"


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (le) ({rate(metric + '_bucket')}))"


def _ratio(part: str, whole: str) -> str:
    return f"{part} / {whole}"


RECORDINGS = (
    Recording("baton:workers:count", f"count by (role) ({series('baton_role')} == 1)"),
    Recording(
        "baton:utilisation:ratio",
        f"sum by (role) ({rate('baton_step_seconds_sum')})"
        f" / on (role) count by (role) ({series('baton_role')} == 1)",
    ),
    Recording("baton:queued_tokens:sum", by_worker_role(series("baton_queued_tokens"))),
    Recording("baton:waiting_requests:sum", by_role(series("baton_waiting_requests"))),
    Recording(
        "baton:kv_use:ratio",
        _ratio(
            by_worker_role(series("baton_pool_blocks", _USED)),
            by_worker_role(series("baton_pool_blocks")),
        ),
    ),
    Recording(
        "baton:prefix_hit:ratio",
        _ratio(
            by_worker_role(rate("baton_prefix_cached_tokens_total")),
            by_worker_role(rate("baton_prefix_queried_tokens_total")),
        ),
    ),
    Recording("baton:handoff_bytes:rate", f"sum({rate('baton_handoff_bytes_total')})"),
    Recording(
        "baton:read_bandwidth:bytes_per_second",
        _ratio(
            f"sum({rate('baton_handoff_bytes_total')})", f"sum({rate('baton_read_seconds_total')})"
        ),
    ),
    Recording("baton:exposed_transfer_seconds:p50", _quantile(0.5, "baton_handoff_tail_seconds")),
    Recording("baton:exposed_transfer_seconds:p99", _quantile(0.99, "baton_handoff_tail_seconds")),
    Recording("baton:ttft_seconds:p50", _quantile(0.5, "baton_ttft_seconds")),
    Recording("baton:ttft_seconds:p99", _quantile(0.99, "baton_ttft_seconds")),
    Recording("baton:itl_seconds:p50", _quantile(0.5, "baton_itl_seconds")),
    Recording("baton:itl_seconds:p99", _quantile(0.99, "baton_itl_seconds")),
    Recording("baton:requests:rate", f"sum by (outcome) ({rate('baton_requests_total')})"),
    Recording("baton:output_tokens:rate", f"sum({rate('baton_tokens_total', _OUTPUT)})"),
    Recording("baton:goodput_tokens:rate", f"sum({rate('baton_goodput_tokens_total')})"),
    Recording(
        "baton:goodput:ratio",
        _ratio(
            f"sum({rate('baton_objective_requests_total', _MET)})",
            f"sum({rate('baton_objective_requests_total')})",
        ),
    ),
    Recording(
        "baton:disaggregated:ratio",
        _ratio(
            f"sum({rate('baton_disaggregation_decisions_total', _DISAGGREGATED)})",
            f"sum({rate('baton_disaggregation_decisions_total')})",
        ),
    ),
    Recording(
        "baton:cost_per_million_tokens",
        f"1e6 / 3600 * sum({series('baton_worker_price_per_hour')})"
        f" / sum({rate('baton_tokens_total', _OUTPUT)})",
    ),
)

_READY_PREFILL = series("baton_fleet_ready_workers", _PREFILL_ROLE)
_READY_DECODE = series("baton_fleet_ready_workers", _DECODE_ROLE)
# What one model's fleet does is an alert for each job: the routers of a model are one, and another
# model's must not hide what they lack. Workers and drivers export the same series, with zeros.
ALERTS = (
    Alert(  # a job without routers has none to name it: it had one within a day, or none has
        name="BatonNoRouter",
        expr=f"max by (job) (max_over_time({series('baton_role', _ROUTER_ROLE)}[1d])) == 1"
        f" unless max by (job) ({series('baton_role', _ROUTER_ROLE)}) == 1"
        f" or absent(max_over_time({series('baton_role', _ROUTER_ROLE)}[23h]) == 1)",
        lasts="2m",
        severity="critical",
        summary="Prometheus can scrape no router of this job, or none at all; clients may have "
        "nothing to connect to.",
        runbook='docs/operations.md, "No router answers"',
    ),
    Alert(
        name="BatonNoDecodeWorker",
        expr=f"sum by (job) (max by (job, instance) ({series('baton_links', _DECODE)})) == 0"
        f" and max by (job) ({series('baton_role', _ROUTER_ROLE)}) == 1",
        lasts="1m",
        severity="critical",
        summary="No router of this job has a link to a decode worker; requests get 503.",
        runbook='docs/operations.md, "The router\'s /readyz is red"',
    ),
    Alert(
        name="BatonNoReadyDecodeWorker",
        expr=f"sum by (job) (max by (job, instance) ({_READY_DECODE})) == 0"
        f" and sum by (job) ({series('baton_links', _DECODE)}) > 0",
        lasts="1m",
        severity="critical",
        summary="Decode workers are linked to this job's routers, and none takes work; requests "
        "get 503.",
        runbook='docs/operations.md, "A worker is red or restarts"',
    ),
    Alert(  # a fleet without prefill workers has had none for a day
        name="BatonPrefillWorkersLost",
        expr=f"(max by (job, instance) ({_READY_PREFILL}) == 0"
        f" and on (job) max by (job) (max_over_time({_READY_PREFILL}[1d])) > 0"
        f" or max by (job, instance) ({_READY_PREFILL})"
        f" < 0.5 * max by (job, instance) ({series('baton_links', _PREFILL)}))"
        f" and max by (job, instance) ({_READY_DECODE}) > 0",
        lasts="5m",
        severity="warning",
        summary="A router has no prefill worker left, or most of those linked take no work; decode "
        "workers compute prompts.",
        runbook='docs/operations.md, "KV moves slowly or not at all"',
    ),
    Alert(
        name="BatonProcessRestarts",
        expr=f"max by (instance) (changes({series('process_start_time_seconds')}[30m])) > 2",
        lasts="1m",
        severity="warning",
        summary="A process was started again three times in half an hour.",
        runbook='docs/operations.md, "A worker is red or restarts"',
    ),
    Alert(
        name="BatonRegistryDown",
        expr=f"min({series('baton_registry_up')}) == 0",
        lasts="1m",
        severity="critical",
        summary="The registry cannot be used: known workers serve on, new ones are not found.",
        runbook='docs/operations.md, "Redis, or the registry\'s folder, does not answer"',
    ),
    Alert(
        name="BatonWorkersMissing",
        expr=f"sum by (instance, role) ({series('baton_wanted_workers')})"
        f" > sum by (instance, role) ({series('baton_registered_workers')})",
        lasts="10m",
        severity="warning",
        summary="Workers of this baton fleet run on no node; its log names what they wait for.",
        runbook='docs/operations.md, "Workers on several hosts"',
    ),
    Alert(
        name="BatonWorkersOverdue",
        expr=f"max by (reason) ({series('baton_overdue_workers')}) > 0",
        lasts="1m",
        severity="warning",
        summary="Workers that the controller asked for do not get ready; it asks for no more.",
        runbook='docs/operations.md, "Workers do not get ready"',
    ),
    Alert(
        name="BatonControllerLeaderless",
        expr=f"max by (job) ({series('baton_controller_leads')}) == 0"
        f" and max by (job) ({series('baton_controller_acts')}) == 1",
        lasts="5m",
        severity="warning",
        summary="No role controller leads: roles and number of workers stay as they are.",
        runbook='docs/operations.md, "The controller changes no role"',
    ),
    Alert(
        name="BatonRayDown",
        expr=f"min({series('baton_ray_up')}) == 0",
        lasts="5m",
        severity="warning",
        summary="Ray does not answer baton fleet: workers serve on, lost ones are not replaced.",
        runbook='docs/operations.md, "Workers on several hosts"',
    ),
    Alert(
        name="BatonNothingDisaggregated",
        expr=f"sum by (job) ({_most_of_15m('baton_recent_prefills', _MOVED)}) == 0"
        f" and sum by (job) ({_most_of_15m('baton_recent_prefills', _TO_MOVE)}) > 0"
        f" and sum by (job) ({series('baton_links', _PREFILL)}) > 0",
        lasts="15m",
        severity="warning",
        summary="Prefill workers are linked, and KV moved for no prompt: all prompts are placed on "
        "decode workers, or handoffs fail.",
        runbook='docs/operations.md, "KV moves slowly or not at all"',
    ),
    Alert(
        name="BatonRequestsFail",
        expr=f"sum by (job) ({rate('baton_requests_total', _FAILED, '5m')})"
        f" > 0.01 * sum by (job) ({rate('baton_requests_total', window='5m')})",
        lasts="5m",
        severity="critical",
        summary="More than one request in a hundred of this job's routers fails.",
        runbook='docs/operations.md, "Clients get errors"',
    ),
    Alert(
        name="BatonObjectivesMissed",
        expr=f"sum by (job) ({rate('baton_objective_requests_total', _MET, '10m')})"
        f" < 0.9 * sum by (job) ({rate('baton_objective_requests_total', window='10m')})",
        lasts="10m",
        severity="warning",
        summary="More than one request in ten of this job's routers misses slo.ttft_s or "
        "slo.itl_s.",
        runbook='docs/operations.md, "The first token comes late"',
    ),
    Alert(
        name="BatonHandoffStuck",
        expr=f"max by (instance) ({series('baton_oldest_handoff_seconds', _OFFERED)}) > 60",
        lasts="5m",
        severity="warning",
        summary="A handoff has had no offer for a minute and is not over; a peer may be hung.",
        runbook='docs/operations.md, "KV moves slowly or not at all"',
    ),
    Alert(
        name="BatonQuarantinedBlocks",
        expr=f"max by (instance) ({series('baton_quarantined_blocks')}) > 0",
        lasts="15m",
        severity="warning",
        summary="Blocks wait for READs that do not end; a peer may be hung.",
        runbook='docs/operations.md, "Workers run out of blocks"',
    ),
    Alert(
        name="BatonDegradedPairs",
        expr=f"max by (instance) ({series('baton_degraded_pairs')}) > 0",
        lasts="10m",
        severity="warning",
        summary="Pairs of workers transfer KV below handoff.preflight_floor_gb_per_s.",
        runbook='docs/operations.md, "KV moves slowly or not at all"',
    ),
)
