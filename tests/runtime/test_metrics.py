"""Metrics: named by rule, explained, present from the start, readable by Prometheus."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from baton.deploy.nodes import fleet_metrics
from baton.planner.control import control_metrics
from baton.runtime import handoff_metrics, metrics
from baton.runtime.exposition.process_gauges import set_pool_gauges
from baton.runtime.metric_factory import POOL_STATES
from tests.support.metric_values import label_names

OURS = {
    name: metric
    for module in (metrics, handoff_metrics, control_metrics, fleet_metrics)
    for name, metric in vars(module).items()
    if isinstance(metric, (Counter, Gauge, Histogram))
}


ROOT = Path(__file__).parents[2]
PRODUCT = (
    "router",
    "prefill_worker",
    "decode_worker",
    "kv_transfer",
    "engine",
    "runtime",
    "deploy",
    "planner",
)
OWN = [ROOT / "runtime" / name for name in ("metrics.py", "handoff_metrics.py")]


DECLARING = ("metrics", "handoff_metrics", "control_metrics", "fleet_metrics")


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
    handoff_metrics.HANDOFFS.labels("expired").inc()
    assert value("baton_handoffs_total", outcome="expired") == before + 1
    metrics.POOL_BLOCKS.labels("free").set(7)
    assert value("baton_pool_blocks", state="free") == 7
    seen = value("baton_step_seconds_count", role="decode") or 0.0
    metrics.STEP_SECONDS.labels("decode").observe(0.02)
    assert value("baton_step_seconds_count", role="decode") == seen + 1


@pytest.mark.parametrize(
    ("counts", "promised", "use"),
    [
        ({"free": 60, "cached": 20, "used": 20}, 0, 0.2),
        ({"free": 60, "cached": 20, "used": 10, "pinned": 10}, 30, 0.5),
        ({"free": 5, "leased": 95}, 20, 1.0),  # more is promised than is left
        ({}, 0, 0.0),
    ],
)
def test_kv_use_is_what_no_allocation_could_get(
    counts: dict[str, int], promised: int, use: float
) -> None:
    set_pool_gauges(dict.fromkeys(POOL_STATES, 0) | counts, promised)
    assert value("baton_kv_use_ratio") == pytest.approx(use)


def test_no_metric_is_labelled_by_an_id() -> None:
    for metric in OURS.values():
        assert set(label_names(metric)) <= {
            "outcome",
            "reason",
            "decision",
            "kind",
            "state",
            "role",
            "proposer",
            "mode",
            "peer",
            "phase",
            "ratio",
        }


def test_every_metric_and_label_value_is_used_by_the_product() -> None:
    """What is declared and never counted is rendered as a zero that says: it never happens."""
    used, words = set(), set()
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used |= {node.attr} if node.value.id in DECLARING else set()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                words.add(node.target.id)  # a field, as those of a pool's counts
    used |= names_within(used)
    assert len(OURS) > 25 and len(words) > 1000
    assert set(OURS) - used == set()
    samples = [s for metric in OURS.values() for family in metric.collect() for s in family.samples]
    declared = {v for sample in samples for name, v in sample.labels.items() if name != "le"}
    assert "recomputed" in declared and declared - words == set()


def trees() -> list[ast.Module]:
    """The product's files, without those that declare the metrics."""
    paths = [
        path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py") if path not in OWN
    ]
    return [ast.parse(path.read_text(), str(path)) for path in paths]


def names_within(used: set[str]) -> set[str]:
    """Names that those functions of metrics.py use which the product calls."""
    functions = [n for n in ast.parse(OWN[0].read_text()).body if isinstance(n, ast.FunctionDef)]
    return {
        node.id
        for function in functions
        if function.name in used
        for node in ast.walk(function)
        if isinstance(node, ast.Name)
    }
