"""Values of Prometheus metrics, or of one series of theirs (`metric.labels(...)`)."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram


def metric_value(metric: Counter | Gauge) -> float:
    """Return the value of a counter or a gauge."""
    (family,) = metric.collect()
    (found,) = [each.value for each in family.samples if not each.name.endswith("_created")]
    return found


def metric_sum(histogram: Histogram) -> float:
    """Return the sum of all observations."""
    (family,) = histogram.collect()
    (found,) = [each.value for each in family.samples if each.name.endswith("_sum")]
    return found
