"""`baton advise`: over a worker's real control port, and an admin port with recorded traces."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from baton.deploy.cli.main import main
from baton.deploy.control import advice_process
from baton.deploy.control.advice_process import ANSWER_S, Adviser
from baton.deploy.control.orders import Cluster, cluster_at
from baton.deploy.control.router_admin import ADVICE_PATH, RouterAdmin
from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.deploy.host.instance import Instance
from baton.planner.control.worker_report import ANSWER_TIMEOUT_S
from baton.runtime.cluster_config import RegistryConfig, SloConfig
from baton.runtime.config import Config
from baton.runtime.errors import ConfigError, Unavailable
from baton.runtime.registry import DirectoryRegistry, WorkerRecord
from tests.support.control_server import served_control
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness
from tests.support.traced_records import record

TOKEN = "the instance's secret"  # as the control port has it
KEY = "the-operators-key-0123456789"
SETTINGS = Config(slo=SloConfig(0.5, 0.05))
RECORDS = [record(5.0 + 0.2 * n, path=[["chunk", 90_000, 64, "d0"]]) for n in range(40)]


def rows() -> list[list[float]]:
    """Steps of a colocated worker: 90 ms with a prompt of 64 tokens, 10 ms without."""
    draws, found = random.Random(2), list[list[float]]()
    for _ in range(20):
        rows, context = draws.randint(1, 9), draws.randint(100, 900)
        tokens = draws.randint(20, 120)
        found.append([tokens, 0, rows, context, 0.026 + 0.001 * tokens])
        found.append([0, 0, rows, context, 0.01])
    return found


WORK = {
    "requests": 40,
    "ended_requests": 40,
    "ended_output_tokens": 440,
    "prompt_tokens": 2560,
    "output_tokens": 440,
    "busy_s": 3.5,
    "steps": 250,
    "queued_tokens": 0,
    "block_tokens": 16,
    "recent_steps": rows(),
    "verifying_steps": 0,
    "kv_dtype": "bfloat16",
    "step_limits": {
        "prefill_tokens": 512,
        "chunk_tokens": 256,
        "local_prefill_tokens": 128,
        "max_sequences": 64,
    },
}


class AdminStub(ThreadingHTTPServer):
    """An admin port with the records, which keeps what is posted."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), AdminRequests)
        self.posted: list[JsonObject] = []
        self.records = RECORDS
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class AdminRequests(BaseHTTPRequestHandler):
    server: AdminStub

    def do_GET(self) -> None:
        assert self.path == "/traces?latest=1000"
        self._answer(json.dumps({"traces": self.server.records}).encode())

    def do_POST(self) -> None:
        assert self.path == ADVICE_PATH
        self.server.posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        known = self.headers["authorization"] == f"Bearer {KEY}"
        self.send_response(self.server.status if known else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def admin() -> Iterator[AdminStub]:
    with AdminStub() as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.fixture
def cluster(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(advice_process, "ANSWER_S", ANSWER_S * slowness())
    with served_control(instance.folder / "tls") as server:
        audit = json.loads(server.status.audit)
        server.status.audit = json.dumps(audit | {"work": WORK}).encode()
        registry = DirectoryRegistry(instance.folder / "registry", tokens=(TOKEN,))
        address = server.address
        registry.announce(WorkerRecord("decode-0", "b" * 32, "decode", address, address, "tiny", 7))
        later_s = time.time() + 3600.0  # no process renews it, and commands take long here
        os.utime(instance.folder / "registry" / "decode-0.worker", (later_s, later_s))
        location = RegistryConfig(location=str(instance.folder / "registry"))
        secrets = ClusterSecrets((TOKEN,), TOKEN)
        yield cluster_at(location, secrets, server.security("client"))


async def test_advice_is_of_the_worker_and_the_traces(cluster: Cluster, admin: AdminStub) -> None:
    adviser = Adviser(cluster, [RouterAdmin(admin.url, KEY)], SETTINGS)
    try:
        fleet, advice = await adviser.advise()
    finally:
        await adviser.close()
    assert fleet.layout.colocated == 1 and len(fleet.requests) == 40
    assert advice.measured.ttft_s == pytest.approx(0.1)
    assert advice.trusted and advice.now.times.ttft_s == pytest.approx(0.1, rel=0.2)


async def test_a_busy_worker_gets_more_time_for_advice(
    cluster: Cluster, admin: AdminStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a controller's turn waits: the limit of advice is its own."""
    assert ANSWER_S > ANSWER_TIMEOUT_S
    monkeypatch.setattr(advice_process, "ANSWER_S", 0.0)  # none can answer so soon
    adviser = Adviser(cluster, [RouterAdmin(admin.url, KEY)], SETTINGS)
    try:
        with pytest.raises(ConfigError, match="no decode worker answers"):
            await adviser.read()
    finally:
        await adviser.close()


async def test_advice_is_posted_to_each_console(
    cluster: Cluster, admin: AdminStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    adviser = Adviser(cluster, [RouterAdmin(admin.url, KEY)] * 2, SETTINGS)
    try:
        await advice_process.advise_and_post(adviser)
        admin.records = []  # too little: logged, and read again later
        await advice_process.advise_and_post(adviser)
    finally:
        await adviser.close()
    assert len(admin.posted) == 2
    assert admin.posted[0]["alternatives"][0]["change"] == "as it is"


def test_an_admin_port_that_refuses_is_named(admin: AdminStub) -> None:
    with pytest.raises(ConfigError, match="refuses the key"):
        RouterAdmin(admin.url, "another-key-0123456789").traces()
    admin.status = 404
    with pytest.raises(ConfigError, match="answered 404"):
        RouterAdmin(admin.url, KEY).post_advice({})
    with pytest.raises(Unavailable, match="does not answer"):
        RouterAdmin("http://127.0.0.1:9", KEY).traces()
    with pytest.raises(ConfigError, match="no admin port"):
        RouterAdmin("127.0.0.1:9402", KEY).traces()


def test_a_router_needs_its_key(
    cluster: Cluster,
    admin: AdminStub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("BATON_ADMIN_KEY", raising=False)
    monkeypatch.setenv("BATON_TOKEN", TOKEN)
    where = ["--registry", cluster.registry.location, "--router", admin.url]
    assert main(["advise", *where]) == 78
    assert "BATON_ADMIN_KEY is not set" in capsys.readouterr().err


def test_the_command_prints_causes_and_changes(
    cluster: Cluster,
    admin: AdminStub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("BATON_ADMIN_KEY", KEY)
    monkeypatch.setenv("BATON_TOKEN", TOKEN)
    files = cluster.security
    names = ("authority", "certificate", "key")
    sets = [f"--set=security.{name}={getattr(files, name)}" for name in names]
    where = ["--registry", cluster.registry.location, "--router", admin.url, *sets]
    assert main(["advise", *where, "--set", "slo.ttft_s=0.5"]) == 0
    printed = capsys.readouterr().out
    assert "TTFT is 100.0 ms" in printed and "the computation of the prompt" in printed
    assert "2 colocated" in printed
    saved = tmp_path / "new" / "saved"
    assert main(["advise", *where, "--json", "--save", str(saved)]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 40
    fitted = tmp_path / "fitted.json"
    assert main(["calibrate", *where, "--name", "this one", "--out", str(fitted)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["kind", "chunk", "step", "host", "not"]
    assert (
        json.loads(fitted.read_text())["step"]
        == json.loads((saved / "timing.json").read_text())["step"]
    )
    again = ["--trace", str(saved / "traffic.jsonl"), "--timing", str(saved / "timing.json")]
    assert main(["simulate", *again, "--colocated", "1"]) == 0
    assert "40 of 40 finished" in capsys.readouterr().out
