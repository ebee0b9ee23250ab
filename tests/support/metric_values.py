"""Values of Prometheus metrics, or of one series of theirs (`metric.labels(...)`)."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram


def metric_value(metric: Counter | Gauge) -> float:
    """Return the value of a counter or a gauge."""
    (family,) = metric.collect()
    (found,) = [each.value for each in family.samples if not each.name.endswith("_created")]
    return found


def label_names(metric: Counter | Gauge | Histogram) -> tuple[str, ...]:
    """Return the names of the labels. prometheus_client shows them only in series that exist."""
    return tuple(metric._labelnames)


def bucket_counts(histogram: Histogram) -> dict[float, float]:
    """Return the observations in each bucket, without those of lower ones, by its upper bound."""
    (family,) = histogram.collect()
    counts, below = dict[float, float](), 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            counts[float(sample.labels["le"])] = sample.value - below
            below = sample.value
    return counts


def metric_sum(histogram: Histogram) -> float:
    """Return the sum of all observations."""
    (family,) = histogram.collect()
    (found,) = [each.value for each in family.samples if each.name.endswith("_sum")]
    return found
