"""A real Prometheus scrapes the driver of `baton fleet`: its queries return data."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.deploy.monitoring import generate
from chaos.network import unavailable
from chaos.ray_nodes import HEAD
from tests.support.prometheus_server import (
    OF_THE_DRIVER,
    PROMETHEUS,
    PrometheusServer,
    dashboard_queries,
)
from tests.support.ray_fleet import ADMIN_PORT, running_fleet

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed here"),
    pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces: {unavailable()}"),
]


def test_the_queries_of_the_driver_return_data(tmp_path: Path) -> None:
    queries = [expr for _, expr in dashboard_queries(driver=True)]
    assert len(queries) >= len(OF_THE_DRIVER)
    with running_fleet(tmp_path) as fleet:
        fleet.add_node("n1", {"baton-prefill": 1})
        fleet.add_node("n2", {"baton-decode": 1})
        fleet.start_driver("--by-role")
        target = f"{fleet.nodes.address_of(HEAD)}:{ADMIN_PORT}"
        folder = tmp_path / "prometheus"
        folder.mkdir()
        prometheus = PrometheusServer(folder, [target], ROOT / generate.PLAIN_RULES)
        try:
            prometheus.wait_ready()
            registered = 'baton_registered_workers{role="decode"}'
            fleet.until(lambda: prometheus.numbers(registered) == [1.0])
            fleet.until(lambda: all(prometheus.numbers(expr) for expr in queries))
            assert prometheus.numbers("baton_ray_nodes") == [3.0]
            assert prometheus.numbers('baton_wanted_workers{role="decode"}') == [1.0]
        finally:
            prometheus.close()
