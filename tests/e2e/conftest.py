"""Real processes: a router and workers as `baton serve` starts them, with NIXL and gRPC between
them, on ports that the system gives. A `Cluster` starts, kills, pauses and audits them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.models import corpus_mix
from baton.models.embedded import embedded_model
from baton.runtime.registry import DirectoryRegistry, WorkerRecord

START_S = 90.0
TASKS = ("chat", "facts", "recall", "lists", "arithmetic", "json", "story")
HERE = Path(__file__).parent
BATON = [sys.executable, "-P", "-m", "baton.deploy.cli"]
CORRUPTING = [sys.executable, "-P", str(HERE / "corrupting_worker.py")]


class Cluster:
    """One router and its workers; `settings` are `section.key=value`."""

    def __init__(self, folder: Path, settings: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.settings = ("pool.blocks=640", "worker.dtype=float32", "worker.threads=1", *settings)
        self.url = ""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = os.environ | {
            "BATON_TOKEN": "a secret of this test",
            "OMP_WAIT_POLICY": "passive",
            "GOMP_SPINCOUNT": "0",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, prefill: int, decode: int, *, command: list[str] | None = None) -> Cluster:
        """Start all, and wait until a request could be served."""
        for role, count in (("prefill", prefill), ("decode", decode)):
            for number in range(count):
                self.start_worker(role, f"{role}-{number}", command=command)
        self._start_router()
        self.wait_ready(prefill + decode)
        return self

    def start_worker(self, role: str, name: str, *, command: list[str] | None = None) -> None:
        arguments = ["worker", "--role", role, "--worker-id", name]
        self._spawn(name, (command or BATON) + arguments)

    def wait_ready(self, workers: int) -> None:
        """Until so many workers are announced and linked to the router."""
        deadline = time.monotonic() + START_S
        while len(self.records()) < workers or self._linked() < workers:
            self._check_alive()
            assert time.monotonic() < deadline, f"not ready: {self.records()}\n{self.logs()}"
            time.sleep(0.1)

    def records(self) -> dict[str, WorkerRecord]:
        """The announced workers whose process this cluster started last, and which lives."""
        found = DirectoryRegistry(self.folder / "registry").workers()
        return {
            record.worker_id: record
            for record in found
            if record.pid == self._processes[record.worker_id].pid
            and self._processes[record.worker_id].poll() is None
        }

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a worker's process; SIGKILL also waits for its end."""
        self._processes[name].send_signal(number)
        if number is signal.SIGKILL:
            self._processes[name].wait(10)

    def terminate(self, name: str) -> int:
        """SIGTERM to a worker; its exit code."""
        self.kill(name, signal.SIGTERM)
        return self.wait_end(name)

    def wait_end(self, name: str) -> int:
        """The exit code of a worker that has been told to end."""
        return self._processes[name].wait(30)

    def audit(self, name: str) -> dict[str, Any]:
        address = self.records()[name].admin_address
        answer = httpx.get(f"http://{address}/audit", timeout=10)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """One value of a worker's metrics; 0 if it is not there."""
        address = self.records()[name].admin_address
        text = httpx.get(f"http://{address}/metrics", timeout=10).text
        wanted = ",".join(f'{key}="{value}"' for key, value in labels.items())
        series = f"{metric}{{{wanted}}}" if wanted else metric
        found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def total(self, metric: str, **labels: str) -> float:
        """The sum of a metric over the living decode workers."""
        decode = [name for name in self.records() if name.startswith("decode")]
        return sum(self.metric(name, metric, **labels) for name in decode)

    def quiet(self, within_s: float) -> None:
        """Wait until no worker holds anything; fails naming what is left."""
        deadline = time.monotonic() + within_s
        while left := [name for name in self.records() if not self._at_rest(name)]:
            audits = {name: self.audit(name) for name in left}
            assert time.monotonic() < deadline, json.dumps(audits, indent=1)
            time.sleep(0.05)

    def logs(self) -> str:
        return "".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def close(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)

    def _at_rest(self, name: str) -> bool:
        audit = self.audit(name)
        blocks = audit["blocks"]
        held = blocks["leased"] + blocks["pinned"] + blocks["quarantined"] + blocks["used"]
        all_here = blocks["free"] + blocks["cached"] == blocks["total"]
        return held == 0 and all_here and audit["open_handoffs"] == 0 and not audit["running"]

    def _start_router(self) -> None:
        self.url = self.start_router("router")

    def start_router(self, name: str) -> str:
        """Start one router more, or anew; its URL once it listens."""
        address = self.folder / f"{name}.address"
        address.unlink(missing_ok=True)
        self._spawn(name, [*BATON, "router", "--address-file", str(address)])
        deadline = time.monotonic() + START_S
        while not address.exists() or not address.read_text():
            self._check_alive()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)
        return f"http://{address.read_text().strip()}"

    def _linked(self) -> int:
        try:
            answer = httpx.get(f"{self.url}/readyz", timeout=5)
        except httpx.TransportError:
            return 0
        return sum(answer.json()["workers"].values()) if answer.status_code == 200 else 0

    def _spawn(self, name: str, command: list[str]) -> None:
        flags = [f"--set={setting}" for setting in self.settings]
        if name.startswith("router"):
            flags += ["--set=router.port=0", "--model-name=small"]
        registry = str(self.folder / "registry")
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [*command, "--model", str(embedded_model()), "--registry", registry, *flags],
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    def _check_alive(self) -> None:
        for name, process in self._processes.items():
            assert process.poll() is None, f"{name} has ended: {self.logs()}"


class Load:
    """A seeded mix of requests, sent at once, and what came back for each."""

    def __init__(self, count: int, seed: int, *, longest: int = 450) -> None:
        rng = random.Random(seed)
        self.bodies = [self._body(rng, longest) for _ in range(count)]

    def _body(self, rng: random.Random, longest: int) -> dict[str, Any]:
        words = ["river", "stone", "seven", "Ada", "blue", "lamp", "counts", "über", "日本", "?"]
        length = int(rng.choice([3, 20, 80, 200, longest]) * rng.uniform(0.5, 1.0)) + 1
        text = " ".join(rng.choice(words) for _ in range(length))
        body: dict[str, Any] = {
            "model": "small",
            "max_tokens": rng.choice([1, 5, 12, 24, 40]),
            "temperature": rng.choice([0, 0, 0.7, 1.2]),
            "seed": rng.randrange(1 << 30),
            "stream": rng.random() < 0.5,
            "ignore_eos": rng.random() < 0.5,
        }
        kind = rng.random()
        if kind < 0.25:
            body["messages"] = [{"role": "user", "content": text}]
        elif kind < 0.5:
            talk = corpus_mix.of_task(rng.randrange(10_000), rng.choice(TASKS), held_out=True)
            body["messages"] = list(talk.messages[:-1])  # the last is the right answer
        else:
            body["prompt"] = text
        self._extras(rng, body)
        return body

    def _extras(self, rng: random.Random, body: dict[str, Any]) -> None:
        if rng.random() < 0.25:
            body["n"] = 3
        if rng.random() < 0.3:
            body |= {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2}
        if rng.random() < 0.25:
            body |= {"top_k": 40, "top_p": 0.9, "min_p": 0.01}
        if rng.random() < 0.3:
            body["stop"] = rng.sample(["a", "in", "the", "or", "\n", "st"], 2)
        if rng.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 3} if "messages" in body else {"logprobs": 3}

    async def run(
        self, url: str, concurrency: int, first: int | None = None
    ) -> list[dict[int, dict[str, Any]]]:
        """The choices of each request, by index; of the `first` ones, or of all."""
        gate = asyncio.Semaphore(concurrency)
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:

            async def one(body: dict[str, Any]) -> dict[int, dict[str, Any]]:
                async with gate:
                    return await ask(client, body)

            return list(await asyncio.gather(*(one(body) for body in self.bodies[:first])))


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """One request, streamed or not: text, finish reason and logprob tokens of each choice."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if not body.get("stream"):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return {c["index"]: _choice([c]) for c in answer.json()["choices"]}
    parts: dict[int, list[dict[str, Any]]] = {}
    last = ""
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            last = line or last
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                parts.setdefault(choice["index"], []).append(choice)
    assert last == "data: [DONE]", f"the stream ended with {last!r}"
    return {index: _choice(chunks) for index, chunks in sorted(parts.items())}


def _choice(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    text, tokens, logprobs = "", [], []
    for chunk in chunks:
        message = chunk.get("delta") or chunk.get("message") or {}
        text += chunk.get("text") or message.get("content") or ""
        given = chunk.get("logprobs") or {}
        for entry in given.get("content") or []:
            tokens.append(entry["token"])
            logprobs.append(entry["logprob"])
        tokens += given.get("tokens") or []
        logprobs += given.get("token_logprobs") or []
    reasons = [c["finish_reason"] for c in chunks if c.get("finish_reason")]
    return {"text": text, "finish": reasons, "tokens": tokens, "logprobs": logprobs}


def differences(
    got: list[dict[int, dict[str, Any]]], expected: list[dict[int, dict[str, Any]]]
) -> list[str]:
    """The choices that are not token for token the same; logprobs within 1e-3."""
    found = []
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        for index in sorted(ours.keys() | theirs.keys()):
            a, b = ours.get(index), theirs.get(index)
            if a is None or b is None or {**a, "logprobs": 0} != {**b, "logprobs": 0}:
                found.append(f"request {number} choice {index}:\n  {a}\n  {b}")
            elif a["logprobs"] != pytest.approx(b["logprobs"], abs=1e-3):
                found.append(f"request {number} choice {index}: logprobs differ")
    return found


@pytest.fixture(scope="session")
def compare() -> Callable[..., list[str]]:
    return differences


@pytest.fixture(scope="session")
def corrupting() -> list[str]:
    """The command of a worker whose mover spoils blocks."""
    return CORRUPTING


@pytest.fixture(scope="session")
def make_load() -> Callable[..., Load]:
    return Load


@pytest.fixture
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Clusters of one test; they end with it, and their logs are shown if it failed."""
    made: list[Cluster] = []

    def make(*settings: str) -> Cluster:
        cluster = Cluster(tmp_path_factory.mktemp("cluster"), settings)
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        cluster.close()
        print(cluster.logs())


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker for all tests that leave them whole."""
    cluster = Cluster(tmp_path_factory.mktemp("pair"), ("router.placement=disaggregated",))
    try:
        yield cluster.start(1, 1)
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One process without disaggregation: what every answer is held against."""
    cluster = Cluster(tmp_path_factory.mktemp("alone"), ("router.placement=local",))
    try:
        yield cluster.start(0, 1)
    finally:
        cluster.close()


@pytest.fixture
async def client(pair: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=pair.url, timeout=60) as made:
        yield made
