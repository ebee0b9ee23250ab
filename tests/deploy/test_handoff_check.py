"""`baton doctor` on running instances: it warns when prefill workers exist and no KV moves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.deploy.cli import handoff_check
from baton.deploy.cli.process_list import ProcessRow
from baton.proto import worker_pb2
from baton.router.console.console_app import page_files
from baton.router.fleet.fleet_reports import FleetReports
from baton.runtime import metric_factory, metrics

ROOT = Path(__file__).resolve().parents[2]
ROUTER = """
# TYPE baton_links gauge
baton_links{{peer="prefill"}} {prefill}
baton_links{{peer="decode"}} 2.0
baton_recent_prefills{{outcome="moved"}} {moved}
baton_recent_prefills{{outcome="failed"}} {failed}
baton_recent_prefills{{outcome="incompatible"}} {local}
baton_recent_prefills{{outcome="short"}} {short}
baton_recent_prefills{{outcome="cached"}} {cached}
"""


def judged(
    prefill: int, moved: int, failed: int, local: int, short: int = 1, cached: int = 0
) -> handoff_check.Finding:
    text = ROUTER.format(
        prefill=prefill, moved=moved, failed=failed, local=local, short=short, cached=cached
    )
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


@pytest.mark.parametrize(("short", "cached"), [(3, 0), (0, 4), (3, 4)])
def test_prompts_that_need_no_handoff_are_not_a_warning(short: int, cached: int) -> None:
    found = judged(prefill=2, moved=0, failed=0, local=0, short=short, cached=cached)
    assert found.level == "ok" and f"KV moved for 0 of {short + cached} prompts" in found.found
    assert (f"short {short}" in found.found) == bool(short)
    assert (f"cached {cached}" in found.found) == bool(cached)


def test_a_fault_among_many_short_prompts_is_the_warning() -> None:
    found = judged(prefill=2, moved=0, failed=1, local=0, short=90)
    assert found.level == "warn" and "short 90, failed 1" in found.found
    assert "handoff failed" in found.remedy


def test_each_outcome_without_a_move_has_a_remedy_or_is_harmless() -> None:
    named = ["moved", *handoff_check.REMEDIES, *handoff_check.HARMLESS]
    assert sorted(named) == sorted(metric_factory.PREFILL_OUTCOMES)


def test_all_places_name_one_remedy_for_unlike_workers() -> None:
    """With the version, by which all handoffs end in the middle of an upgrade."""
    remedy = handoff_check.REMEDIES["incompatible"]
    assert "processor type and version" in remedy and "during an upgrade" in remedy
    links: list[Any] = [
        SimpleNamespace(
            up=True,
            takes_work=True,
            worker_id=f"{role}-0",
            record=SimpleNamespace(role=role),
            worker_hello=worker_pb2.WorkerHello(model_fingerprint=role, block_size=16),
        )
        for role in ("prefill", "decode")
    ]
    with capture_logs() as logs:
        FleetReports().report(links)
    assert [(each["event"], each["remedy"]) for each in logs] == [
        ("prefill workers not used", remedy)
    ]
    assert remedy in page_files()["/overview.js"].body.decode()
    for page in ("docs/metrics.md", "docs/operations.md"):
        assert remedy in (ROOT / page).read_text(), page


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
