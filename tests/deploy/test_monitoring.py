"""Rules and dashboards: generated, current, about metrics that exist; promtool reads them all."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.deploy.monitoring import generate
from baton.deploy.monitoring.dashboards import DASHBOARDS
from baton.deploy.monitoring.panels import CHOSEN
from baton.deploy.monitoring.rules import ALERTS, RECORDINGS
from baton.deploy.nodes import fleet_metrics
from baton.planner.control import control_metrics
from baton.runtime import metrics
from tests.support.prometheus_server import PROMTOOL

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / generate.PLAIN_RULES
NAME = re.compile(r"\b(?:baton|process)(?:_[a-z0-9]+)+\b")
RECORD = re.compile(r"\bbaton:[a-z0-9_:]+")
MATCHER = re.compile(r'\b(\w+)(?:=|!=)"(\w+)"')
OTHER_LABELS = {"role", "le"}

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed here")


def expressions() -> Iterator[str]:
    yield from (each.expr for each in RECORDINGS)
    yield from (each.expr for each in ALERTS)
    for dashboard in DASHBOARDS:
        yield from dashboard.queries()


def samples() -> dict[str, list[dict[str, str]]]:
    """The names of all series that a process exposes, with the labels of each."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in metrics.REGISTRY.collect():
        found.setdefault(family.name, []).append({})
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_committed_files_are_those_that_are_generated() -> None:
    wrong = [
        name
        for name, text in generate.files().items()
        if not (ROOT / name).is_file() or (ROOT / name).read_text() != text
    ]
    assert wrong == [], "run `make dashboards`"
    folder = ROOT / generate.CHART_DASHBOARDS
    kept = {str(path.relative_to(ROOT)) for path in folder.glob("*")}
    assert kept <= set(generate.files())


def test_each_metric_and_value_that_is_asked_for_exists() -> None:
    assert fleet_metrics.RAY_UP is not None  # declared: the fleet's driver exports them
    assert control_metrics.OVERDUE_WORKERS is not None  # and the controller this
    known, records = samples(), {each.record for each in RECORDINGS}
    assert sum(1 for _ in expressions()) > 80
    for expr in expressions():
        assert set(NAME.findall(expr)) <= set(known), expr
        assert set(RECORD.findall(expr)) <= records, expr
        named = NAME.findall(expr)
        for label, wanted in MATCHER.findall(expr):
            if label not in OTHER_LABELS:
                values = {labels.get(label) for name in named for labels in known[name]}
                assert wanted in values, f"{label}={wanted} in {expr}"


def test_rates_are_of_counters_and_counters_are_rates() -> None:
    kinds = {family.name: family.type for family in metrics.REGISTRY.collect()}
    for expr in expressions():
        for name in re.findall(r"rate\((\w+)\{", expr):
            stem = re.sub(r"_(total|bucket|sum|count)$", "", name)
            assert kinds.get(stem) in ("counter", "histogram"), (name, expr)
        for name, kind in kinds.items():
            if kind == "counter" and re.search(rf"(?<!rate\()\b{name}_total\b", expr):
                pytest.fail(f"{name} without a rate in {expr}")


def test_every_query_selects_the_release_and_fits_the_grid() -> None:
    assert len({each.name for each in DASHBOARDS}) == 5
    for dashboard in DASHBOARDS:
        body = dashboard.body()
        assert json.loads(json.dumps(body)) == body
        places = [tuple(panel["gridPos"].values()) for panel in body["panels"]]
        assert len(set(places)) == len(places) == len(dashboard.panels)
        assert all(x + w <= 24 for w, _, x, _ in places)
        for panel in body["panels"]:
            assert panel["description"].endswith(".") and panel["targets"]
            for target in panel["targets"]:
                named = len(NAME.findall(target["expr"])) + len(RECORD.findall(target["expr"]))
                assert target["expr"].count(CHOSEN) == named, target["expr"]
                assert "$SELECT" not in target["expr"]


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    found = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert f"{len(RECORDINGS) + len(ALERTS)} rules found" in found


@needs_promtool
def test_promtool_parses_the_query_of_each_panel(tmp_path: Path) -> None:
    queries = [query for dashboard in DASHBOARDS for query in dashboard.queries()]
    rules = [
        {"record": f"query:{number}", "expr": generate.selected(query, "")}
        for number, query in enumerate(queries)
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", str(file))


def test_operations_says_what_to_do_about_each_alert() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert set(re.findall(r"\bBaton[A-Z]\w+", page)) == {each.name for each in ALERTS}
    for each in ALERTS:
        heading = each.runbook.partition('"')[2].rstrip('"').replace("/readyz", "`/readyz`")
        assert f"## {heading}\n" in page, each.runbook


LOCAL = 'baton_disaggregation_decisions_total{decision="local",reason="incompatible"}'
SENT = 'baton_disaggregation_decisions_total{decision="disaggregated",reason="cheaper"}'
ROUTER = 'baton_links{job="b",instance="router",peer="prefill"}'


READY = 'baton_fleet_ready_workers{job="b",instance="router",role="decode"}'
READY_PREFILL = READY.replace("decode", "prefill")
CONTROLLER = 'baton_controller_{1}{{job="b",instance="{0}"}}'
BOTH_ACT = {CONTROLLER.format(each, "acts"): "1x60" for each in ("a", "b")}
STARTED = 'process_start_time_seconds{job="b",instance="d"}'
REGISTRY = 'baton_registry_up{{job="b",instance="{0}"}}'
DRIVER = 'baton_{0}_workers{{job="b",instance="f",role="decode"}}'
RAY = 'baton_ray_up{job="b",instance="f"}'
HANDOFF = 'baton_oldest_handoff_seconds{job="b",instance="d",state="offered"}'
QUARANTINE = 'baton_quarantined_blocks{job="b",instance="d"}'
PAIRS = 'baton_degraded_pairs{job="b",instance="d"}'
OVERDUE = 'baton_overdue_workers{{job="b",instance="{0}",reason="{1}"}}'
OF_WORKER, OF_ROUTER = {"instance": "d"}, {"instance": "router"}
ROLE = 'baton_role{{job="b",instance="{0}",role="{1}"}}'
WORKER_STAYS = {ROLE.format("d", "decode"): "1x60", ROLE.format("d", "router"): "0x60"}


def alert_case(
    alert: str,
    series: dict[str, str],
    fires: bool,
    minutes: int = 40,
    labels: dict[str, str] | None = None,
) -> Any:
    made = next(each for each in ALERTS if each.name == alert)
    fired = {
        "exp_labels": {"severity": made.severity} | (labels or {}),
        "exp_annotations": {"summary": made.summary, "runbook": made.runbook},
    }
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minutes}m", "alertname": alert, "exp_alerts": [fired] * fires}
        ],
    }


CASES = {
    "no_router": alert_case(
        "BatonNoRouter",
        WORKER_STAYS | {ROLE.format(each, "router"): "1x10 stale" for each in ("r", "s")},
        fires=True,
    ),
    "nothing_scraped": alert_case("BatonNoRouter", {}, fires=True),
    "one_router_left": alert_case(
        "BatonNoRouter",
        WORKER_STAYS
        | {ROLE.format("r", "router"): "1x10 stale", ROLE.format("s", "router"): "1x60"},
        fires=False,
    ),
    "router_restarted": alert_case(
        "BatonNoRouter",
        WORKER_STAYS | {ROLE.format("r", "router"): "1x38 stale 1x20"},
        fires=False,
    ),
    "all_local": alert_case(
        "BatonNothingDisaggregated", {LOCAL: "0+5x60", SENT: "0x60", ROUTER: "2x60"}, fires=True
    ),
    "some_sent": alert_case(
        "BatonNothingDisaggregated", {LOCAL: "0+5x60", SENT: "0+1x60", ROUTER: "2x60"}, fires=False
    ),
    "no_prefill_worker": alert_case(
        "BatonNothingDisaggregated", {LOCAL: "0+5x60", SENT: "0x60", ROUTER: "0x60"}, fires=False
    ),
    "no_decode_worker": alert_case(
        "BatonNoDecodeWorker", {ROUTER.replace("prefill", "decode"): "1x10 0x50"}, fires=True
    ),
    "all_red": alert_case(
        "BatonNoReadyDecodeWorker",
        {ROUTER.replace("prefill", "decode"): "2x60", READY: "2x10 0x50"},
        fires=True,
    ),
    "one_red": alert_case(
        "BatonNoReadyDecodeWorker",
        {ROUTER.replace("prefill", "decode"): "2x60", READY: "1x60"},
        fires=False,
    ),
    "prefill_lost": alert_case(
        "BatonPrefillWorkersLost",
        {READY_PREFILL: "2x10 0x50", READY: "2x60", ROUTER: "2x10 0x50"},
        fires=True,
        labels=OF_ROUTER,
    ),
    "most_prefill_red": alert_case(
        "BatonPrefillWorkersLost",
        {READY_PREFILL: "3x10 1x50", READY: "2x60", ROUTER: "3x60"},
        fires=True,
        labels=OF_ROUTER,
    ),
    "one_prefill_red": alert_case(
        "BatonPrefillWorkersLost",
        {READY_PREFILL: "2x10 1x50", READY: "2x60", ROUTER: "2x60"},
        fires=False,
    ),
    "never_prefill": alert_case(
        "BatonPrefillWorkersLost",
        {READY_PREFILL: "0x60", READY: "2x60", ROUTER: "0x60"},
        fires=False,
    ),
    "both_roles_lost": alert_case(
        "BatonPrefillWorkersLost",
        {READY_PREFILL: "2x10 0x50", READY: "2x10 0x50", ROUTER: "2x10 0x50"},
        fires=False,
    ),
    "restarts": alert_case(
        "BatonProcessRestarts", {STARTED: "1x20 2x4 3x4 4x30"}, fires=True, labels=OF_WORKER
    ),
    "one_restart": alert_case("BatonProcessRestarts", {STARTED: "1x20 2x40"}, fires=False),
    "registry_down": alert_case(
        "BatonRegistryDown",
        {REGISTRY.format("d"): "1x60", REGISTRY.format("p"): "1x30 0x30"},
        fires=True,
    ),
    "registry_up": alert_case("BatonRegistryDown", {REGISTRY.format("d"): "1x60"}, fires=False),
    "one_overdue": alert_case(
        "BatonWorkersOverdue",
        {OVERDUE.format("a", "image"): "0x20 1x40", OVERDUE.format("b", "image"): "0x60"},
        fires=True,
        labels={"reason": "image"},
    ),
    "none_overdue": alert_case(
        "BatonWorkersOverdue", {OVERDUE.format("a", "image"): "1x20 0x40"}, fires=False
    ),
    "leaderless": alert_case(
        "BatonControllerLeaderless",
        BOTH_ACT | {CONTROLLER.format("a", "leads"): "1x10 0x50"},
        fires=True,
        labels={"job": "b"},
    ),
    "another_leads": alert_case(
        "BatonControllerLeaderless",
        BOTH_ACT
        | {CONTROLLER.format("a", "leads"): "1x38 0x20"}
        | {CONTROLLER.format("b", "leads"): "0x39 1x20"},
        fires=False,
    ),
    "controllers_observe": alert_case(
        "BatonControllerLeaderless",
        {CONTROLLER.format("a", each): "0x60" for each in ("leads", "acts")},
        fires=False,
    ),
    "two_percent_fail": alert_case(
        "BatonRequestsFail",
        {
            'baton_requests_total{outcome="failed"}': "0+2x60",
            'baton_requests_total{outcome="finished"}': "0+98x60",
        },
        fires=True,
    ),
    "few_fail": alert_case(
        "BatonRequestsFail",
        {
            'baton_requests_total{outcome="failed"}': "0+1x60",
            'baton_requests_total{outcome="finished"}': "0+999x60",
        },
        fires=False,
    ),
    "objectives_missed": alert_case(
        "BatonObjectivesMissed",
        {
            'baton_objective_requests_total{outcome="ttft_missed"}': "0+2x60",
            'baton_objective_requests_total{outcome="met"}': "0+8x60",
        },
        fires=True,
    ),
    "workers_missing": alert_case(
        "BatonWorkersMissing",
        {DRIVER.format("wanted"): "3x60", DRIVER.format("registered"): "3x10 2x50"},
        fires=True,
        labels={"role": "decode"},
    ),
    "workers_moved": alert_case(
        "BatonWorkersMissing",
        {DRIVER.format("wanted"): "3x60", DRIVER.format("registered"): "3x35 2x3 3x30"},
        fires=False,
    ),
    "ray_down": alert_case("BatonRayDown", {RAY: "1x10 0x50"}, fires=True),
    "ray_restarted": alert_case("BatonRayDown", {RAY: "1x37 0x2 1x30"}, fires=False),
    "handoff_stuck": alert_case(
        "BatonHandoffStuck", {HANDOFF: "0x10 0+60x50"}, fires=True, labels=OF_WORKER
    ),
    "handoffs_end": alert_case("BatonHandoffStuck", {HANDOFF: "0x10 20x50"}, fires=False),
    "quarantine": alert_case(
        "BatonQuarantinedBlocks", {QUARANTINE: "0x10 5x50"}, fires=True, labels=OF_WORKER
    ),
    "short_quarantine": alert_case(
        "BatonQuarantinedBlocks", {QUARANTINE: "0x35 5x4 0x30"}, fires=False
    ),
    "degraded": alert_case(
        "BatonDegradedPairs", {PAIRS: "0x10 2x50"}, fires=True, labels=OF_WORKER
    ),
    "not_degraded": alert_case("BatonDegradedPairs", {PAIRS: "0x60"}, fires=False),
}


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    tests = [each["alert_rule_test"][0] for each in CASES.values()]
    fired = {each["alertname"] for each in tests if each["exp_alerts"]}
    assert fired == {each.name for each in ALERTS}


@needs_promtool
@pytest.mark.parametrize("case", CASES)
def test_alerts_fire_when_they_should(case: str, tmp_path: Path) -> None:
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [CASES[case]]}))
    promtool("test", "rules", str(file))


RECORDED = {
    "baton:cost_per_million_tokens": 1e6 / 3600 * 6 / 10,  # two workers of 3, 10 tokens a second
    'baton:queued_tokens:sum{role="prefill"}': 700,
    'baton:kv_use:ratio{role="decode"}': 0.25,
    "baton:read_bandwidth:bytes_per_second": 2000,
    "baton:goodput:ratio": 0.8,
}


@needs_promtool
def test_recorded_series_have_their_values(tmp_path: Path) -> None:
    series = {ROLE.format("p", "prefill"): "1x30", ROLE.format("d", "decode"): "1x30"}
    series |= {ROLE.format("p", "decode"): "0x30", ROLE.format("d", "prefill"): "0x30"}
    for instance in ("p", "d"):
        own = f'job="b",instance="{instance}"'
        series[f"baton_worker_price_per_hour{{{own}}}"] = "3x30"
        series[f"baton_queued_tokens{{{own}}}"] = "700x30" if instance == "p" else "5x30"
    series['baton_tokens_total{job="b",instance="d",kind="output"}'] = "0+600x30"
    pool = 'baton_pool_blocks{{job="b",instance="d",state="{0}"}}'
    series |= {pool.format("free"): "60x30", pool.format("cached"): "15x30"}
    series |= {pool.format("used"): "20x30", pool.format("leased"): "5x30"}
    series |= {"baton_handoff_bytes_total": "0+6000x30", "baton_read_seconds_total": "0+3x30"}
    objective = 'baton_objective_requests_total{{outcome="{0}"}}'
    series |= {objective.format("met"): "0+8x30", objective.format("itl_missed"): "0+2x30"}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f"round({name}, 0.001)",
                "eval_time": "20m",
                "exp_samples": [
                    {"labels": name[name.find("{") :] if "{" in name else "{}", "value": value}
                ],
            }
            for name, wanted in RECORDED.items()
            for value in [round(wanted, 3)]
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [test]}))
    promtool("test", "rules", str(file))
