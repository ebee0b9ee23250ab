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
baton_recent_prefills{{outcome="moved"}} {moved}
baton_recent_prefills{{outcome="failed"}} {failed}
baton_recent_prefills{{outcome="incompatible"}} {local}
baton_recent_prefills{{outcome="short"}} 1.0
"""


def judged(prefill: int, moved: int, failed: int, local: int) -> handoff_check.Finding:
    text = ROUTER.format(prefill=prefill, moved=moved, failed=failed, local=local)
    return handoff_check.judged("port-8000", handoff_check.parsed(text))


def test_unused_prefill_workers_warn_with_the_reason() -> None:
    found = judged(prefill=2, moved=0, failed=0, local=7)
    assert found.level == "warn" and "KV moved for 0 of 8 prompts: incompatible 7" in found.found
    assert found.remedy == handoff_check.REMEDIES["incompatible"]


def test_handoffs_that_all_fail_are_a_warning() -> None:
    found = judged(prefill=2, moved=0, failed=5, local=0)
    assert found.level == "warn" and "0 of 6 prompts: failed 5, short 1" in found.found
    assert "handoff failed" in found.remedy


@pytest.mark.parametrize(("prefill", "moved", "local"), [(0, 0, 7), (2, 3, 1), (2, 1, 7)])
def test_fleets_in_order_are_not_a_warning(prefill: int, moved: int, local: int) -> None:
    assert judged(prefill, moved, 0, local).level == "ok"


def test_each_outcome_without_a_move_has_a_remedy() -> None:
    assert {"moved", *handoff_check.REMEDIES} == set(metric_factory.PREFILL_OUTCOMES)


def test_own_metrics_are_parsed_as_they_are_rendered() -> None:
    metrics.RECENT_PREFILLS.labels("short").set(3)
    found = handoff_check.parsed(metrics.render().decode())
    assert handoff_check.total(found, handoff_check.PREFILLS, outcome="short") == 3


def test_a_router_that_does_not_answer_gives_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ProcessRow("port-1", "router", "running", 1, 1, address="127.0.0.1:9")]
    monkeypatch.setattr(handoff_check, "running", lambda: rows)
    assert handoff_check.kv_transfers() == []


def test_labels_are_read_as_prometheus_writes_them() -> None:
    text = 'baton_links{peer="prefill",why="\\"a\\", b\\\\"} 2.0 1700000000000\nother_total 9\n'
    ((name, labels),) = found = handoff_check.parsed(text)
    assert name == "baton_links" and dict(labels) == {"peer": "prefill", "why": '"a", b\\'}
    assert found[name, labels] == 2.0
