"""`baton doctor` on running instances: it warns when prefill workers exist and no KV moves."""

from __future__ import annotations

import pytest

from baton.deploy.cli import handoff_check
from baton.deploy.cli.process_list import ProcessRow
from baton.runtime import metric_factory, metrics

ROUTER = """
# TYPE baton_links gauge
baton_links{{peer="prefill"}} {prefill}
baton_links{{peer="decode"}} 2.0
baton_disaggregation_decisions_total{{decision="disaggregated",reason="cheaper"}} {sent}
baton_disaggregation_decisions_total{{decision="local",reason="incompatible"}} {local}
baton_disaggregation_decisions_total{{decision="local",reason="short"}} 1.0
"""
WORKER = 'baton_handoffs_total{{outcome="completed"}} {moved}\n'


def judged(prefill: int, sent: int, local: int, moved: int) -> handoff_check.Finding:
    router = handoff_check.parsed(ROUTER.format(prefill=prefill, sent=sent, local=local))
    workers = [handoff_check.parsed(WORKER.format(moved=moved)), {}]
    return handoff_check.judged("port-8000", router, workers)


def test_unused_prefill_workers_warn_with_the_reason() -> None:
    found = judged(prefill=2, sent=0, local=7, moved=0)
    assert found.level == "warn" and "incompatible 7, short 1" in found.found
    assert found.remedy == handoff_check.REMEDIES["incompatible"]


def test_handoffs_that_all_fail_are_a_warning() -> None:
    found = judged(prefill=2, sent=5, local=0, moved=0)
    assert found.level == "warn" and "5 were to be disaggregated" in found.found
    assert "handoff failed" in found.remedy


@pytest.mark.parametrize(
    ("prefill", "sent", "local", "moved"), [(0, 0, 7, 0), (2, 5, 1, 3), (2, 0, 7, 1)]
)
def test_fleets_in_order_are_not_a_warning(prefill: int, sent: int, local: int, moved: int) -> None:
    assert judged(prefill, sent, local, moved).level == "ok"


def test_each_reason_of_the_metric_has_a_remedy() -> None:
    local = {reason for decision, reason in metric_factory.DECISIONS if decision == "local"}
    assert local == set(handoff_check.REMEDIES)


def test_own_metrics_are_parsed_as_they_are_rendered() -> None:
    before = handoff_check.total(
        handoff_check.parsed(metrics.render().decode()), handoff_check.DECISIONS, reason="short"
    )
    metrics.DECISIONS_MADE.labels("local", "short").inc(3)
    after = handoff_check.parsed(metrics.render().decode())
    assert handoff_check.total(after, handoff_check.DECISIONS, reason="short") == before + 3


def test_a_router_that_does_not_answer_gives_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ProcessRow("port-1", "router", "running", 1, 1, address="127.0.0.1:9")]
    monkeypatch.setattr(handoff_check, "running", lambda: rows)
    assert handoff_check.kv_transfers() == []


def test_labels_are_read_as_prometheus_writes_them() -> None:
    text = 'baton_links{peer="prefill",why="\\"a\\", b\\\\"} 2.0 1700000000000\nother_total 9\n'
    ((name, labels),) = found = handoff_check.parsed(text)
    assert name == "baton_links" and dict(labels) == {"peer": "prefill", "why": '"a", b\\'}
    assert found[name, labels] == 2.0
