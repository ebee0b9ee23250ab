"""The Prometheus metrics of routers and workers: names, units, labels, meaning.

Those of handoffs are in `handoff_metrics`. Names are `baton_<noun>_<unit>`. Labels have few, fixed
values, never an id. A process fills the metrics of its role and leaves the others at zero. Modules
import the metric and count; nothing decides by one. `render` is the body of GET /metrics.
"""

from __future__ import annotations

from prometheus_client import generate_latest

from baton.runtime import handoff_metrics  # noqa: F401  every process exposes them, at zero too
from baton.runtime.metric_factory import (
    DECISIONS,
    POOL_STATES,
    PREFILL_OUTCOMES,
    PROPOSERS,
    REGISTRY,
    ROLES,
    TOKENS_BUCKETS,
    counter,
    counter_of_pairs,
    gauge,
    histogram,
)
from baton.runtime.sampling import MAX_DRAFT_TOKENS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render() -> bytes:
    """All metrics in Prometheus' text format."""
    return generate_latest(REGISTRY)


# -- every process -------------------------------------------------------------------------

ROLE = gauge(
    "baton_role",
    "The role that this process has now: 1 for it, 0 for the others.",
    "role",
    ("router", "prefill", "decode"),
)
LOG_LINES_LOST = counter("baton_log_lines_lost_total", "Log lines that could not be written.")
TASKS = gauge("baton_tasks", "Tasks of the process's event loop.")
HEAP_BYTES = gauge(
    "baton_heap_bytes",
    "Bytes allocated from the C library and not freed; a leak makes it grow, fragmentation does "
    "not. 0 where the C library does not report it.",
)
PYTHON_BLOCKS = gauge(
    "baton_python_blocks", "Memory blocks that Python has allocated for its objects."
)

# -- router --------------------------------------------------------------------------------

REQUESTS = counter(
    "baton_requests_total",
    "Requests ended, by how: finished, failed, cancelled, or refused before any token.",
    "outcome", ("finished", "failed", "cancelled", "refused"),
)  # fmt: skip
FINISHED_CHOICES = counter(
    "baton_finished_choices_total",
    "Choices that were answered to their end, by finish reason.",
    "reason", ("stop", "length", "tool_calls"),
)  # fmt: skip
ACTIVE_REQUESTS = gauge("baton_active_requests", "Requests that hold an admission ticket.")
BODY_BYTES = gauge(
    "baton_body_bytes", "Bytes of request bodies that are being received or tokenized."
)
BODY_REFUSALS = counter(
    "baton_body_refusals_total",
    "Bodies refused or cut off because such bodies held too many bytes: those of one API key, or "
    "all.",
    "reason", ("key", "all"),
)  # fmt: skip
TTFT = histogram("baton_ttft_seconds", "From a request's arrival to its first token sent.")
ITL = histogram("baton_itl_seconds", "Between two tokens of one choice, as sent.")
OBJECTIVES = counter(
    "baton_objective_requests_total",
    "Requests that were answered or failed, by what they missed of `slo.ttft_s` and `slo.itl_s`.",
    "outcome", ("met", "ttft_missed", "itl_missed", "both_missed", "failed"),
)  # fmt: skip
GOODPUT_TOKENS = counter(
    "baton_goodput_tokens_total", "Output tokens of requests that met their objectives."
)
OUTPUT_TOKENS = histogram(
    "baton_output_tokens", "Output tokens of an ended request.", buckets=TOKENS_BUCKETS
)
E2E = histogram("baton_request_seconds", "From a request's arrival to its end.")
REQUEST_QUEUE_SECONDS = histogram(
    "baton_request_queue_seconds",
    "Waits of a request before its prompt's first chunk: for a worker, KV room and blocks, and for "
    "handoffs and attempts that were lost.",
)
REQUEST_PREFILL_SECONDS = histogram(
    "baton_request_prefill_seconds",
    "Steps with a request's prompt, the waits between them, and its first token.",
)
REQUEST_DECODE_SECONDS = histogram(
    "baton_request_decode_seconds", "From a request's first token to its end."
)
REQUEST_INFERENCE_SECONDS = histogram(
    "baton_request_inference_seconds", "A request's prefill and decode together."
)
PROMPT_TOKENS = histogram("baton_prompt_tokens", "Tokens of a prompt.", buckets=TOKENS_BUCKETS)
REFUSALS = counter(
    "baton_refusals_total",
    "Requests for an answer that were refused, by the error that the client got; of those without "
    "a valid key, requests of any kind.",
    "reason",
    (
        "unauthenticated",
        "invalid",
        "context_exceeded",
        "not_found",
        "body_too_large",
        "rate_limited",
        "overloaded",
        "deadline",
        "draining",
        "unavailable",
        "client_left",
        "internal",
    ),
)
FLEET_QUEUED_TOKENS = gauge(
    "baton_fleet_queued_tokens",
    "Prompt tokens still to be computed on the linked workers of a role, as they report it.",
    "role", ROLES,
)  # fmt: skip
FLEET_WAITING = gauge(
    "baton_fleet_waiting_requests", "Requests that wait on a role's linked workers.", "role", ROLES
)
FLEET_REQUESTS = gauge("baton_fleet_requests", "Requests on decode workers, of all routers.")
FLEET_KV_USE = gauge(
    "baton_fleet_kv_use_ratio",
    "Share of the KV blocks of a role's linked workers that no allocation could get.",
    "role", ROLES,
)  # fmt: skip
FLEET_READY = gauge(
    "baton_fleet_ready_workers", "Linked workers of a role that take work.", "role", ROLES
)
MIGRATIONS = counter(
    "baton_migrations_total",
    "Migrations of a request, or of one of its choices, to another worker, by why: its decode "
    "worker was lost or hung, drained, was full, had no memory, or failed it; or its prefill "
    "workers had left.",
    "reason",
    ("worker_lost", "draining", "overloaded", "out_of_memory", "failed", "stale_placement"),
)
RETRIES_REFUSED = counter(
    "baton_retries_refused_total",
    "Requests that lost their worker and were not migrated: their own attempts, or the router's "
    "retry budget, were used up.",
    "reason", ("attempts", "budget"),
)  # fmt: skip
DEADLINES_PASSED = counter(
    "baton_deadlines_passed_total",
    "Requests ended by their deadline, by phase: received and tokenized, waiting "
    "to be placed, or answered.",
    "phase", ("receiving", "placing", "answering"),
)  # fmt: skip
STALE_OUTPUTS = counter(
    "baton_stale_outputs_total",
    "Outputs of an older attempt, of an ended choice, or seen before; they are dropped.",
)
REGISTRY_UP = gauge(
    "baton_registry_up",
    "Whether the registry can be used: 1, or 0 during an outage, in which known workers serve on.",
)
REGISTRY_UP.set(1)
LINKS = gauge(
    "baton_links",
    "Links of this process that are up, by the role of the other end.",
    "peer", ("prefill", "decode", "router"),
)  # fmt: skip
LINK_BREAKS = counter("baton_link_breaks_total", "Links lost by an error or by silence.")
HANGS = counter(
    "baton_hangs_total",
    "Workers that answered on their link but finished no step in time, by role.",
    "role", ("prefill", "decode"),
)  # fmt: skip
QUARANTINED_REQUESTS = counter(
    "baton_requests_quarantined_total",
    "Requests that failed because workers hung on them, the last worker with no other request.",
)
CIRCUITS = gauge(
    "baton_circuits",
    "Workers by the state of their circuit: open ones get no requests, half-open ones one.",
    "state", ("closed", "open", "half_open"),
)  # fmt: skip
SLOW_STARTS = gauge(
    "baton_slow_starts",
    "Workers that joined lately and get a growing share of placements, by role.",
    "role", ROLES,
)  # fmt: skip
SLOW_START_PLACEMENTS = counter(
    "baton_slow_start_placements_total",
    "Placements after which a worker in its slow start has had its share and waits, by role.",
    "role", ROLES,
)  # fmt: skip
OTHER_ROUTERS = gauge(
    "baton_other_routers",
    "Other routers whose circuits and placements this one hears of, through Redis.",
)
ROUTER_REPORTS = counter(
    "baton_router_reports_total",
    "Reports between routers: taken, refused as unsigned, copied or too old, or lost as the server "
    "could not be reached.",
    "outcome", ("taken", "refused", "lost"),
)  # fmt: skip
DEGRADED_PAIRS = gauge(
    "baton_degraded_pairs",
    "Pairs of linked workers whose last measured READs were below the floor: placement counts "
    "what their READs take.",
)
CIRCUITS_OPENED = counter(
    "baton_circuits_opened_total",
    "Circuits opened, by why: the worker failed requests, was much slower than the others, or "
    "hung.",
    "reason", ("failing", "slow", "hung"),
)  # fmt: skip
DECISIONS_MADE = counter_of_pairs(
    "baton_disaggregation_decisions_total",
    "Placements, by where the prompt was to be prefilled and why.",
    ("decision", "reason"),
    DECISIONS,
)
RECENT_PREFILLS = gauge(
    "baton_recent_prefills",
    "Prompts prefilled within the last five minutes: moved, if a prefill worker's KV was read; "
    "failed, if handoffs failed; else why a decode worker was to compute them. Handed-over prompts "
    "with one-token answers do not count.",
    "outcome", PREFILL_OUTCOMES,
)  # fmt: skip
PLACEMENT_SECONDS = histogram(
    "baton_placement_seconds",
    "Time of one placement decision.",
    buckets=(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 1e-2),
)
INDEX_BLOCKS = gauge("baton_index_blocks", "Blocks of the workers' caches in the router's index.")
INDEX_EVICTIONS = counter(
    "baton_index_evictions_total",
    "Blocks forgotten, those of the oldest use, because the index was full (4,194,304 blocks).",
)
GRAMMARS_REFUSED = counter(
    "baton_grammars_refused_total", "Requests refused because of their grammar."
)
GRAMMAR_SECONDS = histogram("baton_grammar_seconds", "Validation of a grammar.")
CONSOLE_SECONDS = counter("baton_console_seconds_total", "CPU seconds of the console's state.")
TOKENIZE_SECONDS = histogram("baton_tokenize_seconds", "Receiving a body to its prompt's tokens.")

# -- both kinds of worker --------------------------------------------------------------------

TOKENS = counter(
    "baton_tokens_total",
    "Tokens computed or drawn: prompt tokens computed, output tokens, and tokens computed again "
    "after a preemption.",
    "kind", ("prompt", "output", "recomputed"),
)  # fmt: skip
PROPOSED_TOKENS = counter(
    "baton_proposed_tokens_total",
    "Tokens proposed to be verified in one step with a known one, by proposer.",
    "proposer", PROPOSERS,
)  # fmt: skip
ACCEPTED_TOKENS = counter(
    "baton_accepted_tokens_total",
    "Proposed tokens that equalled the model's own draws, by proposer.",
    "proposer", PROPOSERS,
)  # fmt: skip
PROPOSED_DRAFT_TOKENS = histogram(
    "baton_proposed_draft_tokens",
    "Proposed tokens of one draft: those above n proposed position n + 1.",
    buckets=range(MAX_DRAFT_TOKENS),
)
ACCEPTED_DRAFT_TOKENS = histogram(
    "baton_accepted_draft_tokens",
    "Accepted tokens of one draft: those above n accepted position n + 1.",
    buckets=range(MAX_DRAFT_TOKENS),
)
SPECULATION_PAUSES = counter(
    "baton_speculation_pauses_total",
    "Times at which batches of some size stopped to speculate for a while, because steps without "
    "proposals had yielded more tokens a second.",
)
PREFIX_CACHED_TOKENS = counter(
    "baton_prefix_cached_tokens_total", "Prompt tokens taken from the prefix cache."
)
PREFIX_QUERIED_TOKENS = counter(
    "baton_prefix_queried_tokens_total", "Prompt tokens looked up in the prefix cache."
)
WAITING_REQUESTS = gauge(
    "baton_waiting_requests",
    "Requests that wait: on a router for a placement, on a decode worker for credit, on a prefill "
    "worker for blocks.",
)
RUNNING_REQUESTS = gauge(
    "baton_running_requests",
    "Requests of a worker beyond its queue: of a decode worker those with a choice in the batch "
    "or with credit, of a prefill worker those whose prompts are being computed.",
)
QUEUED_TOKENS = gauge(
    "baton_queued_tokens",
    "Prompt tokens still to be computed on this worker, with the rest of prompts in chunks.",
)
KV_USE = gauge("baton_kv_use_ratio", "Share of KV blocks in use, or promised by granted credit.")
PROMISED_BLOCKS = gauge(
    "baton_promised_blocks", "Blocks of credit that are granted and not yet allocated."
)
WORKER_PRICE = gauge(
    "baton_worker_price_per_hour", "Price of this worker for an hour: `slo.price_per_hour`."
)
RANKS = gauge("baton_ranks", "Processes over which this worker's model is split: `worker.tp`.")
EXPERT_GROUPS = gauge(
    "baton_expert_groups",
    "Groups of this worker's ranks that hold different experts of a mixture: `worker.ep`.",
)
QUEUE_SECONDS = histogram("baton_queue_seconds", "From a request's receipt to its admission.")
GRAMMARS_COMPILED = counter("baton_grammars_compiled_total", "Grammars compiled on this worker.")
GRAMMAR_COMPILE_SECONDS = histogram(
    "baton_grammar_compile_seconds", "Compiling of a grammar that the worker did not have."
)
MASK_SECONDS = counter(
    "baton_mask_seconds_total", "Seconds of mask threads in which masks of grammars were computed."
)
MASKS = counter("baton_masks_total", "Masks of grammars computed.")
MASK_WAIT_SECONDS = counter(
    "baton_mask_wait_seconds_total", "Seconds for which draws waited for the masks of grammars."
)
STEP_SECONDS = histogram(
    "baton_step_seconds",
    "Device time of an engine step, by the worker's role.",
    "role", ("prefill", "decode"),
)  # fmt: skip
STEP_SEQUENCES = histogram(
    "baton_step_sequences", "Sequences of a step.", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
)
POOL_BLOCKS = gauge(
    "baton_pool_blocks",
    "Blocks of the KV pool by state; the states add up to the pool.",
    "state", POOL_STATES,
)  # fmt: skip
PREEMPTIONS = counter(
    "baton_preemptions_total",
    "Put back because blocks ran out, to be computed or fetched again: running sequences, prompts "
    "that were prefilled locally, and handoffs whose credit was taken back.",
    "kind", ("running", "prefilling", "fetching"),
)  # fmt: skip
BROKEN_SLICES = counter(
    "baton_broken_slices_total", "Slices whose logits were not finite; their request failed."
)
MEMORY_SHORTAGES = counter(
    "baton_memory_shortages_total",
    "How often the device had no memory for a step or a part of it, which was then run again in "
    "smaller parts; a slice that does not fit alone is cut, or its request fails.",
)
