"""Values of this process's own metrics, as numbers."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram


def by_label(metric: Counter | Gauge) -> dict[str, float]:
    """Return the value of each series of a metric, by its labels joined with a space; a metric
    without labels has the one key ''."""
    (family,) = metric.collect()
    return {
        " ".join(sample.labels.values()): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def cumulative_counts(histogram: Histogram) -> tuple[list[float], list[float]]:
    """Return the upper bounds of a histogram's buckets, and how many observations are at most
    that large."""
    (family,) = histogram.collect()
    buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
    return [float(each.labels["le"]) for each in buckets], [each.value for each in buckets]


def sum_of(histogram: Histogram) -> float:
    """Return the sum of all observations."""
    (family,) = histogram.collect()
    return sum(sample.value for sample in family.samples if sample.name.endswith("_sum"))
