"""Metrics: named by rule, explained, present from the start, readable by Prometheus."""

from __future__ import annotations

import re

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from baton.runtime import metrics

OURS = {
    name: metric
    for name, metric in vars(metrics).items()
    if isinstance(metric, (Counter, Gauge, Histogram))
}


def value(name: str, **labels: str) -> float | None:
    return metrics.REGISTRY.get_sample_value(name, labels)


def test_names_follow_the_rule_and_every_metric_is_explained() -> None:
    assert len(OURS) > 25
    for metric in OURS.values():
        (family,) = metric.describe()
        kind = "_total" if isinstance(metric, Counter) else ""
        assert re.fullmatch(r"baton(_[a-z0-9]+)+", family.name)
        assert not kind or not family.name.endswith("_total")  # the client adds it
        assert family.documentation[0].isupper() and family.documentation.endswith(".")
        assert not family.name.endswith(("_ms", "_mb"))  # base units only


def test_what_is_rendered_is_prometheus_text() -> None:
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    for metric in OURS.values():
        (family,) = metric.describe()
        assert family.name in families
    assert "process_resident_memory_bytes" in families
    assert metrics.CONTENT_TYPE.startswith("text/plain")


def test_known_series_exist_before_their_first_event() -> None:
    text = metrics.render().decode()
    for series in (
        'baton_handoffs_total{outcome="completed"}',
        'baton_handoffs_total{outcome="failed"}',
        'baton_local_prefills_total{reason="placed"}',
        'baton_requests_total{outcome="refused"}',
        'baton_pool_blocks{state="leased"}',
        "baton_checksum_failures_total",
        "baton_quarantined_blocks",
    ):
        assert series in text


def test_counting_is_seen() -> None:
    before = value("baton_handoffs_total", outcome="expired") or 0.0
    metrics.HANDOFFS.labels("expired").inc()
    assert value("baton_handoffs_total", outcome="expired") == before + 1
    metrics.POOL_BLOCKS.labels("free").set(7)
    assert value("baton_pool_blocks", state="free") == 7
    seen = value("baton_step_seconds_count", role="decode") or 0.0
    metrics.STEP_SECONDS.labels("decode").observe(0.02)
    assert value("baton_step_seconds_count", role="decode") == seen + 1


def test_no_metric_is_labelled_by_an_id() -> None:
    for metric in OURS.values():
        assert set(metric._labelnames) <= {
            "outcome",
            "reason",
            "kind",
            "state",
            "role",
            "mode",
            "peer",
            "phase",
        }
