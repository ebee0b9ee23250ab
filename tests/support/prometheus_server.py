"""A real Prometheus for tests, Debian's package `prometheus`, which brings promtool.

Scrapes and evaluates every second. Where the machine has no such binary, tests skip by its name.
"""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from baton.deploy.monitoring.dashboards import DASHBOARDS
from tests.support.waiting import wait_until

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
START_S = 30.0
# What the driver of `baton fleet` exports, and no other process.
OF_THE_DRIVER = ("baton_wanted_workers", "baton_worker_restarts_total", "baton_ray_nodes")


def dashboard_queries(*, driver: bool) -> Iterator[tuple[str, str]]:
    """Yield the panel and the query of each target of every dashboard: of those that read the
    driver of `baton fleet`, or of all others."""
    for dashboard in DASHBOARDS:
        for panel in dashboard.body()["panels"]:
            for target in panel["targets"]:
                expr = target["expr"].replace("$release", ".*")
                if any(name in expr for name in OF_THE_DRIVER) is driver:
                    yield f"{dashboard.name}: {panel['title']}", expr


def promtool(*arguments: str) -> str:
    """Run promtool and return what it prints. Raises AssertionError with that if it fails."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class PrometheusServer:
    """One server that scrapes `targets` (host:port) with these rules. `folder` keeps its data."""

    def __init__(self, folder: Path, targets: Sequence[str], rules: Path) -> None:
        assert PROMETHEUS is not None
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        scrape = {"job_name": "baton", "static_configs": [{"targets": list(targets)}]}
        timing = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config = {"global": timing, "rule_files": [str(rules)], "scrape_configs": [scrape]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with open(folder / "prometheus.log", "wb") as log:
            self._process = subprocess.Popen(
                [
                    PROMETHEUS,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> None:
        """Wait until it answers queries. Raises RuntimeError with its log if it does not."""

        def ready() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(self.log())
            try:
                return httpx.get(f"http://127.0.0.1:{self._port}/-/ready", timeout=5).is_success
            except httpx.TransportError:
                return False  # it does not listen yet

        wait_until(ready, START_S, every_s=0.1, show=self.log, error=RuntimeError)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of an instant query. Raises RuntimeError if it is refused."""
        url = f"http://127.0.0.1:{self._port}/api/v1/query"
        answer = httpx.get(url, params={"query": expr}, timeout=30).json()
        if answer["status"] != "success":
            raise RuntimeError(f"{expr}: {answer.get('error')}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def numbers(self, expr: str) -> list[float]:
        """Return the values of an instant query that are numbers: a quotient by zero is none."""
        values = [float(series["value"][1]) for series in self.query(expr)]
        return [value for value in values if math.isfinite(value)]

    def get(self, path: str) -> Any:
        """Return the data of another route of its API."""
        return httpx.get(f"http://127.0.0.1:{self._port}{path}", timeout=30).json()["data"]

    def log(self) -> str:
        return (self._folder / "prometheus.log").read_text(errors="replace")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
