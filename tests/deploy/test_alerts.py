"""Each alert fires when it should, and does not when it should not: promtool evaluates them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from baton.deploy.monitoring import generate
from baton.deploy.monitoring.rules import ALERTS
from tests.support.json_values import JsonObject
from tests.support.prometheus_server import PROMTOOL, promtool

RULES = Path(__file__).resolve().parents[2] / generate.PLAIN_RULES

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed here")


LOCAL = 'baton_recent_prefills{job="b",outcome="incompatible"}'
SHORT = 'baton_recent_prefills{job="b",outcome="short"}'
CACHED = 'baton_recent_prefills{job="b",outcome="cached"}'
FAILED = 'baton_recent_prefills{job="b",outcome="failed"}'
MOVED = 'baton_recent_prefills{job="b",outcome="moved"}'
ROUTER = 'baton_links{job="b",instance="router",peer="prefill"}'


LINKED = ROUTER.replace("prefill", "decode")
IS_ROUTER = 'baton_role{job="b",instance="router",role="router"}'
READY = 'baton_fleet_ready_workers{job="b",instance="router",role="decode"}'
READY_PREFILL = READY.replace("decode", "prefill")
CONTROLLER = 'baton_controller_{1}{{job="b",instance="{0}"}}'
BOTH_ACT = {CONTROLLER.format(each, "acts"): "1x60" for each in ("a", "b")}
STARTED = 'process_start_time_seconds{job="b",instance="d"}'
REGISTRY = 'baton_registry_up{{job="b",instance="{0}"}}'
DRIVER = 'baton_{0}_workers{{job="b",instance="f",role="decode"}}'
RAY = 'baton_ray_up{job="b",instance="f"}'
HANDOFF = 'baton_oldest_handoff_seconds{job="b",instance="d",state="reading"}'
QUARANTINE = 'baton_quarantined_blocks{job="b",instance="d"}'
PAIRS = 'baton_degraded_pairs{job="b",instance="d"}'
OVERDUE = 'baton_overdue_workers{{job="b",instance="{0}",reason="{1}"}}'
REQUESTS = 'baton_requests_total{{job="{0}",outcome="{1}"}}'
OBJECTIVES = 'baton_objective_requests_total{{job="{0}",outcome="{1}"}}'
OF_WORKER, OF_ROUTER, OF_JOB = {"instance": "d"}, {"instance": "router"}, {"job": "b"}
ROLE = 'baton_role{{job="b",instance="{0}",role="{1}"}}'
ROUTERS_LEAVE = {ROLE.format(each, "router"): "1x10 stale" for each in ("r", "s")}
WORKER_STAYS = {ROLE.format("d", "decode"): "1x60", ROLE.format("d", "router"): "0x60"}


def of_model_a(series: dict[str, str]) -> dict[str, str]:
    """Return the series as those of another model's routers: the job `a`."""
    return {name.replace('job="b"', 'job="a"'): values for name, values in series.items()}


def alert_case(
    alert: str,
    series: dict[str, str],
    fires: bool,
    minutes: int = 40,
    labels: dict[str, str] | None = None,
) -> JsonObject:
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
        WORKER_STAYS | ROUTERS_LEAVE,
        fires=True,
        labels=OF_JOB,
    ),
    "no_router_of_one_model": alert_case(
        "BatonNoRouter",
        WORKER_STAYS | ROUTERS_LEAVE | of_model_a({ROLE.format("r", "router"): "1x60"}),
        fires=True,
        labels=OF_JOB,
    ),
    "no_router_for_days": alert_case(
        "BatonNoRouter", WORKER_STAYS | ROUTERS_LEAVE, fires=True, minutes=3000
    ),
    "model_without_routers_for_days": alert_case(
        "BatonNoRouter",
        ROUTERS_LEAVE | of_model_a({ROLE.format("r", "router"): "1x3000"}),
        fires=False,
        minutes=3000,
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
        "BatonNothingDisaggregated",
        {LOCAL: "5x60", MOVED: "0x60", ROUTER: "2x60"}
        | of_model_a({LOCAL: "5x60", MOVED: "5x60", ROUTER: "2x60"}),
        fires=True,
        labels=OF_JOB,
    ),
    "all_handoffs_fail": alert_case(
        "BatonNothingDisaggregated",
        {FAILED: "5x60", MOVED: "9x2 0x60", ROUTER: "2x60"},
        fires=True,
        labels=OF_JOB,
    ),
    "few_prompts": alert_case(
        "BatonNothingDisaggregated",
        {LOCAL: "1x5 0x5 1x5 0x5 1x5 0x5 1x30", MOVED: "0x60", ROUTER: "2x60"},
        fires=True,
        labels=OF_JOB,
    ),
    "all_short_or_cached": alert_case(
        "BatonNothingDisaggregated",
        {SHORT: "5x60", CACHED: "5x60", LOCAL: "0x60", MOVED: "0x60", ROUTER: "2x60"},
        fires=False,
    ),
    "some_moved": alert_case(
        "BatonNothingDisaggregated", {LOCAL: "5x60", MOVED: "1x60", ROUTER: "2x60"}, fires=False
    ),
    "no_prefill_worker": alert_case(
        "BatonNothingDisaggregated", {LOCAL: "5x60", MOVED: "0x60", ROUTER: "0x60"}, fires=False
    ),
    "no_decode_worker": alert_case(
        "BatonNoDecodeWorker",
        {LINKED: "1x10 0x50", IS_ROUTER: "1x60"} | of_model_a({LINKED: "2x60", IS_ROUTER: "1x60"}),
        fires=True,
        labels=OF_JOB,
    ),
    "zeros_of_a_worker": alert_case(
        "BatonNoDecodeWorker", {LINKED: "0x60", IS_ROUTER: "0x60"}, fires=False
    ),
    "all_red": alert_case(
        "BatonNoReadyDecodeWorker",
        {LINKED: "2x60", READY: "2x10 0x50"} | of_model_a({LINKED: "2x60", READY: "2x60"}),
        fires=True,
        labels=OF_JOB,
    ),
    "one_red": alert_case(
        "BatonNoReadyDecodeWorker",
        {LINKED: "2x60", READY: "1x60"},
        fires=False,
    ),
    "prefill_lost": alert_case(
        "BatonPrefillWorkersLost",
        {READY_PREFILL: "2x10 0x50", READY: "2x60", ROUTER: "2x10 0x50"},
        fires=True,
        labels=OF_ROUTER | OF_JOB,
    ),
    "prefill_lost_in_one_job": alert_case(  # another model never had prefill workers
        "BatonPrefillWorkersLost",
        {READY_PREFILL: "2x10 0x50", READY: "2x60", ROUTER: "2x10 0x50"}
        | of_model_a({READY_PREFILL: "0x60", READY: "2x60", ROUTER: "0x60"}),
        fires=True,
        labels=OF_ROUTER | OF_JOB,
    ),
    "most_prefill_red": alert_case(
        "BatonPrefillWorkersLost",
        {READY_PREFILL: "3x10 1x50", READY: "2x60", ROUTER: "3x60"},
        fires=True,
        labels=OF_ROUTER | OF_JOB,
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
            REQUESTS.format("b", "failed"): "0+2x60",
            REQUESTS.format("b", "finished"): "0+98x60",
            REQUESTS.format("a", "finished"): "0+999x60",
        },
        fires=True,
        labels=OF_JOB,
    ),
    "few_fail": alert_case(
        "BatonRequestsFail",
        {
            REQUESTS.format("b", "failed"): "0+1x60",
            REQUESTS.format("b", "finished"): "0+999x60",
        },
        fires=False,
    ),
    "objectives_missed": alert_case(
        "BatonObjectivesMissed",
        {
            OBJECTIVES.format("b", "ttft_missed"): "0+2x60",
            OBJECTIVES.format("b", "met"): "0+8x60",
            OBJECTIVES.format("a", "met"): "0+90x60",
        },
        fires=True,
        labels=OF_JOB,
    ),
    "workers_missing": alert_case(
        "BatonWorkersMissing",
        {DRIVER.format("wanted"): "3x60", DRIVER.format("registered"): "3x10 2x50"},
        fires=True,
        labels={"instance": "f", "role": "decode"},
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
