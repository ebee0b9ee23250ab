"""Declares Prometheus metrics in the process's one registry: see `runtime/metrics.py`.

Known series exist from the start, at zero, so that a rate sees their first event.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip
TOKENS_BUCKETS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
# values of labels that more than one place names
POOL_STATES = ("free", "cached", "used", "leased", "pinned", "quarantined")
LOCAL_REASONS = (
    "configured", "cheaper", "short", "cached", "alone", "no_prefill_worker", "incompatible",
    "too_large", "left",
)  # fmt: skip
DECISIONS = (
    ("disaggregated", "configured"),
    ("disaggregated", "cheaper"),
    *(("local", reason) for reason in LOCAL_REASONS),
)
PREFILL_OUTCOMES = ("moved", "failed", *LOCAL_REASONS)
ROLES = ("prefill", "decode")
HANDOFF_STATES = ("waiting", "reading", "closing")
PROPOSERS = ("ngram", "suffix", "draft", "eagle3")


def counter(
    name: str, meaning: str, label: str | None = None, values: Sequence[str] = ()
) -> Counter:
    made = Counter(name, meaning, _labels(label), registry=REGISTRY)
    for value in values:
        made.labels(value)
    return made


def counter_of_pairs(
    name: str, meaning: str, labels: tuple[str, str], values: Sequence[tuple[str, str]]
) -> Counter:
    """Declare a counter with two labels and its pairs of values."""
    made = Counter(name, meaning, labels, registry=REGISTRY)
    for pair in values:
        made.labels(*pair)
    return made


def gauge(name: str, meaning: str, label: str | None = None, values: Sequence[str] = ()) -> Gauge:
    made = Gauge(name, meaning, _labels(label), registry=REGISTRY)
    for value in values:
        made.labels(value)
    return made


def histogram(
    name: str,
    meaning: str,
    label: str | None = None,
    values: Sequence[str] = (),
    buckets: Sequence[float] = SECONDS_BUCKETS,
) -> Histogram:
    own = tuple(buckets)
    made = Histogram(name, meaning, _labels(label), registry=REGISTRY, buckets=own)
    for value in values:
        made.labels(value)
    return made


def _labels(label: str | None) -> list[str]:
    return [] if label is None else [label]
