"""A real Prometheus scrapes a fleet under load: every query of every dashboard returns data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.deploy.monitoring import generate
from baton.deploy.monitoring.rules import ALERTS, RECORDINGS
from chaos.cluster import Cluster
from tests.support.prometheus_server import PROMETHEUS, PrometheusServer, dashboard_queries
from tests.support.request_load import RequestLoad

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "slo.ttft_s=30",
    "slo.itl_s=5",
    "slo.price_per_hour=2.5",
    "router.placement=disaggregated",
    "worker.speculate=ngram",
)
LOAD_S = 90.0  # longer than it takes until a rate over two minutes has points
KNOWN = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_time_per_output_token_seconds_sum",
    "gen_ai_server_request_duration_seconds_count",
)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed here"),
    pytest.mark.timeout(600),
]


@pytest.fixture
def load(make_load: Callable[..., RequestLoad]) -> RequestLoad:
    return make_load(64, seed=5)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "fleet"
    folder.mkdir()
    made = Cluster(folder, SETTINGS)
    try:
        yield made.start(1, 2)
    finally:
        made.close()


@pytest.fixture
def prometheus(fleet: Cluster, tmp_path: Path) -> Iterator[PrometheusServer]:
    targets = [fleet.url.removeprefix("http://").rstrip("/")]
    targets += [record.admin_address for record in fleet.records().values()]
    made = PrometheusServer(tmp_path, targets, ROOT / generate.PLAIN_RULES)
    try:
        made.wait_ready()
        yield made
    finally:
        made.close()


async def under_load(fleet: Cluster, load: RequestLoad, prometheus: PrometheusServer) -> None:
    until_s = asyncio.get_running_loop().time() + LOAD_S
    turn = 0
    while asyncio.get_running_loop().time() < until_s:
        await load.run(fleet.url, concurrency=8, first=16, salt=f"turn {turn}")
        turn += 1


async def test_each_query_returns_data_under_load(
    fleet: Cluster, prometheus: PrometheusServer, load: RequestLoad
) -> None:
    await under_load(fleet, load, prometheus)
    up = prometheus.query("up == 1")
    assert len(up) == 4, prometheus.get("/api/v1/targets")
    queries = list(dashboard_queries(driver=False))
    assert [query for query in queries if not prometheus.numbers(query[1])] == []
    for rule in RECORDINGS:
        assert prometheus.numbers(rule.record), rule.record
    for name in KNOWN:
        assert prometheus.numbers(name), name
    numbers = {rule.record: prometheus.query(rule.record) for rule in RECORDINGS}
    for record in (
        "baton:output_tokens:rate",
        "baton:goodput:ratio",
        "baton:cost_per_million_tokens",
        "baton:read_bandwidth:bytes_per_second",
        "baton:exposed_transfer_seconds:p99",
        "baton:ttft_seconds:p99",
        "baton:disaggregated:ratio",
    ):
        (series,) = numbers[record]
        assert float(series["value"][1]) > 0, (record, series)
    assert max(prometheus.numbers('baton_recent_prefills{outcome="moved"}')) > 0
    roles = {series["metric"]["role"] for series in numbers["baton:utilisation:ratio"]}
    assert roles == {"prefill", "decode"}
    groups = prometheus.get("/api/v1/rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(RECORDINGS) + len(ALERTS)
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    assert prometheus.query('ALERTS{alertstate="firing"}') == []
