"""A fleet as `baton serve` starts it, on this host's cores: for benchmarks of whole deployments.

`ServedFleet` owns the processes and a folder of its own; leaving its context ends both.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from baton.deploy.bench.answer import Measurement
from baton.deploy.bench.bench_run import BenchPlan, RequestForm, run_bench
from baton.deploy.bench.http_client import ServerAddress
from baton.deploy.bench.load import Load
from baton.deploy.control.orders import Cluster, live_clusters
from baton.deploy.control.router_admin import RouterAdmin
from baton.deploy.host.instance import ADMIN_KEY
from baton.planner.traces import TraceRequest
from benchmarks.fleets.routed_workers import ROOT

START_S = 900.0  # to load the model and compile kernels on a busy machine
STOP_S = 60.0
TOKEN_IDS = (300, 1800)  # of prompts: ordinary ids of every model here
RUNTIME = "XDG_RUNTIME_DIR"
KEY = "the-operators-key-0123456789"
_URL = re.compile(r"Ready at (http://\S+) after")
_CONSOLE = re.compile(r"Console at (http://\S+) ")


class ServedFleet:
    """`prefill` and `decode` workers with a model, `settings` are `section.key=value`. Cores are
    divided among the workers."""

    def __init__(
        self, model: Path, prefill: int, decode: int, settings: Sequence[str] = ()
    ) -> None:
        self._model = model
        self._workers = [f"--prefill={prefill}", f"--decode={decode}"]
        self._settings = [f"--set={setting}" for setting in settings]
        self.url = self._console = self._model_name = ""

    def __enter__(self) -> Self:
        """Start it. Raises RuntimeError if it does not come up."""
        self._folder = tempfile.TemporaryDirectory(prefix="baton-benchmark-")
        self._log = Path(self._folder.name) / "log"
        command = [sys.executable, "-P", "-m", "baton.deploy.cli.main", "serve", str(self._model)]
        command += ["--launcher=process", "--port=0", *self._workers, *self._settings]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {RUNTIME: self._folder.name, ADMIN_KEY: KEY},
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_ready()
        except BaseException:  # interrupted too: no process stays
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def traces(self) -> list[dict[str, object]]:
        """Return the records of the requests that ended last, the newest first."""
        return RouterAdmin(self._console, KEY).traces()

    def send(self, requests: Sequence[TraceRequest], seed: int) -> list[Measurement]:
        """Send requests with random prompts of the seed. Raises RuntimeError if one fails."""
        plan = BenchPlan(
            ServerAddress.parse(self.url, None),
            RequestForm(self._model_name, chat=False),
            Load(list(requests)),
            seed=seed,
            token_ids=TOKEN_IDS,
        )
        found = run_bench(plan, lambda done, total: None).measurements
        if failed := [each.message for each in found if each.error]:
            raise RuntimeError(f"{len(failed)} requests failed, as in: {failed[0]}")
        return found

    @property
    def console(self) -> str:
        """Return the URL of the router's admin port."""
        return self._console

    def cluster(self) -> Cluster:
        """Return its cluster, as commands on this host find it."""
        before = os.environ.get(RUNTIME)
        os.environ[RUNTIME] = self._folder.name
        try:
            (found,) = live_clusters()
        finally:
            if before is None:
                del os.environ[RUNTIME]
            else:
                os.environ[RUNTIME] = before
        return found

    def _wait_ready(self) -> None:
        until_s = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < until_s:
            text = self._log.read_text()
            if (url := _URL.search(text)) and (console := _CONSOLE.search(text)):
                self.url, self._console = url[1], console[1]
                self._model_name = model_name(self.url)
                return
            time.sleep(0.2)  # `baton serve` reports its readiness in its output alone
        raise RuntimeError(f"baton serve did not start:\n{self._log.read_text()[-3000:]}")

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._folder.cleanup()


def model_name(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])
