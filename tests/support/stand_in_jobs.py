"""A `baton serve` whose router and workers are stand-ins: `stand_in_serve.py` runs this script.

    stand_in_jobs.py serve MODEL PORT LAUNCHER [once]       the real serve, with this file's jobs
    stand_in_jobs.py router ... | worker ... | fleet ...    what the jobs run

LAUNCHER nodes is a driver of workers on other nodes. STAND_IN in the environment makes workers
misbehave (bad-model, crash, mute), the router slow to link its prefill workers (late-link), or
torch slow to say how many GPUs there are (slow-gpus).
STAND_IN_TIMEOUT_S is that of --start-timeout, STAND_IN_LOGS the folder where logs are kept.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

from baton.deploy.cli.serve_commands import demo
from baton.deploy.host import gpus
from baton.deploy.host.fleet_progress import WorkerProgress, write_fleet_progress
from baton.deploy.host.instance import write_private
from baton.deploy.host.load_progress import LoadProgress
from baton.deploy.host.process_lifecycle import run_to_exit_code
from baton.deploy.serve import fleet_launcher, plan
from baton.deploy.serve.plan import ServeOptions
from baton.deploy.serve.serve import serve
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.config import Config, RouterConfig, TelemetryConfig
from baton.runtime.errors import ModelError
from baton.runtime.registry import DirectoryRegistry, Role, WorkerRecord

STREAM = (
    'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    'data: {"choices": [{"delta": {"content": "two "}}]}\n\n'
    'data: {"choices": [{"delta": {"content": "words"}}]}\n\n'
    'data: {"choices": []}\n\n'
    "data: [DONE]\n\n"
)
LATE = 7  # answers that name no prefill worker yet
ANNOUNCE_S = 0.5


class Answers(BaseHTTPRequestHandler):
    asked_ready = 0

    def do_GET(self) -> None:
        Answers.asked_ready += self.path == "/readyz"
        fault = os.environ.get("STAND_IN")
        late = fault in ("crash", "mute") or (fault == "late-link" and self.asked_ready <= LATE)
        bodies: dict[str, object] = {
            "/readyz": {"workers": {"prefill": 0 if late else 1, "decode": 1}},
            "/v1/models": {"data": [{"id": "stand-in"}]},
            "/asked": self.asked_ready,
        }
        found = bodies.get(self.path)
        self._send(404 if found is None else 200, json.dumps(found).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(200, STREAM.encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def router() -> None:
    port = int(os.environ["BATON_ROUTER__PORT"])
    server = ThreadingHTTPServer(("127.0.0.1", port), Answers)
    write_private(Path(option("--address-file")), f"127.0.0.1:{server.server_port}")
    server.serve_forever()


def worker() -> None:
    misbehave = os.environ.get("STAND_IN")
    if misbehave == "bad-model":
        raise ModelError("model.safetensors lacks a tensor")
    if misbehave == "crash":
        raise ValueError("a bug")
    LoadProgress()(1 << 30, 4 << 30)
    registry = DirectoryRegistry(Path(option("--registry")))
    role: Role = "prefill" if option("--role") == "prefill" else "decode"
    admin = "127.0.0.1:9"
    record = WorkerRecord(
        option("--worker-id"), os.urandom(16).hex(), role, admin, admin, "m", os.getpid()
    )
    while True:
        if misbehave != "mute":
            registry.announce(record)
        time.sleep(ANNOUNCE_S)  # a worker repeats its announcement as long as it runs


def fleet() -> None:
    """Report workers of two nodes, as the driver of `baton fleet` does: first while one of them
    loads, then, after SIGUSR1, how that one has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    misbehave = os.environ.get("STAND_IN")
    loading = WorkerProgress("decode-0", "10.0.0.2", "loading weights: 25 % of 4.29 GB")
    ready = WorkerProgress("prefill-0", "10.0.0.1", address="10.0.0.1:90", memory="3 GB of KV")
    write_fleet_progress([ready, replace(loading, log="a line")])
    signal.sigwait({signal.SIGUSR1})
    if misbehave == "crash":
        crashed = "its process ended (exit code 1)"
        log = "Traceback:\nValueError: a bug"
        write_fleet_progress([ready, replace(loading, text=crashed, given_up=True, log=log)])
    elif misbehave != "mute":
        write_fleet_progress([ready, replace(loading, text="", address="10.0.0.2:90")])
    while True:
        signal.pause()  # until its supervisor ends it


def replace_in(module: ModuleType, name: str, value: object) -> None:
    """Replace a part of the product for the rest of this process."""
    assert hasattr(module, name)
    setattr(module, name, value)


def main() -> None:
    model, port, launcher = sys.argv[2:5]
    if os.environ.get("STAND_IN") == "slow-gpus":
        replace_in(gpus, "built_for_cuda", lambda: True)
        replace_in(gpus, "has_driver", lambda: True)
        replace_in(gpus, "_QUESTION", "import signal; signal.pause()")
    for module in (plan, fleet_launcher):
        replace_in(module, "baton", lambda *words: (sys.executable, "-P", __file__, *words))
    nodes = launcher == "nodes"
    options = ServeOptions(
        config=Config(
            router=RouterConfig(port=int(port)),
            telemetry=TelemetryConfig(log_folder=os.environ.get("STAND_IN_LOGS", "")),
            registry=RegistryConfig(location="redis://127.0.0.1:1/0" if nodes else ""),
            security=SecurityConfig(tls="off" if nodes else "on"),
        ),
        model=model,
        flags={"router.port": port},
        launcher="process" if launcher == "process" else "ray",
        ray_address="127.0.0.1:1" if nodes else "",
        start_timeout_s=float(os.environ["STAND_IN_TIMEOUT_S"]),
    )
    if "once" in sys.argv:
        demo(options, once=True)
    else:
        serve(options)


JOBS = {"router": router, "worker": worker, "fleet": fleet, "serve": main}

if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    sys.exit(run_to_exit_code(JOBS[sys.argv[1]]))
