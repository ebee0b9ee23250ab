"""Rules and dashboards: generated, current, about metrics that exist; promtool reads them all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from baton.deploy.monitoring import generate
from baton.deploy.monitoring.dashboards import DASHBOARDS
from baton.deploy.monitoring.panels import CHOSEN
from baton.deploy.monitoring.rules import ALERTS, RECORDINGS
from baton.deploy.nodes import fleet_metrics
from baton.planner.control import control_metrics
from baton.runtime import metrics
from tests.support.prometheus_server import PROMTOOL, promtool

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
        corners = [tuple(panel["gridPos"].values()) for panel in body["panels"]]
        assert len(set(corners)) == len(corners) == len(dashboard.panels)
        assert all(x + w <= 24 for w, _, x, _ in corners)
        for panel in body["panels"]:
            assert panel["description"].endswith(".") and panel["targets"]
            for target in panel["targets"]:
                named = len(NAME.findall(target["expr"])) + len(RECORD.findall(target["expr"]))
                assert target["expr"].count(CHOSEN) == named, target["expr"]
                assert "$SELECT" not in target["expr"]


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


ROLE = 'baton_role{{job="b",instance="{0}",role="{1}"}}'
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
