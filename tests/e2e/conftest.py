"""Real processes (chaos/cluster.py starts them), loads for them, and what comes back."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.models.corpus import mix
from chaos.cluster import Cluster

HERE = Path(__file__).parent

TASKS = ("chat", "facts", "recall", "lists", "arithmetic", "json", "story")
CORRUPTING = (sys.executable, "-P", str(HERE / "corrupting_worker.py"))
UNDER_WAY = (
    "router.placement=disaggregated",
    "handoff.lease_s=1.0",
    "step.chunk_tokens=64",  # long prompts take many steps, so that a fault finds them under way
    "step.prefill_tokens=64",
)
FAILING = (sys.executable, "-P", str(HERE / "failing_worker.py"))


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
            talk = mix.of_task(rng.randrange(10_000), rng.choice(TASKS), held_out=True)
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
        self, url: str, concurrency: int, first: int | None = None, salt: str = ""
    ) -> list[dict[int, dict[str, Any]]]:
        """The choices of each request, by index; of the `first` ones, or of all. No prefix is
        found that was asked for with another `salt`."""
        gate = asyncio.Semaphore(concurrency)
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:

            async def one(body: dict[str, Any]) -> dict[int, dict[str, Any]]:
                async with gate:
                    return await ask(client, body | {"cache_salt": salt} if salt else body)

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
def corrupting() -> tuple[str, ...]:
    """The command of a worker whose mover spoils blocks."""
    return CORRUPTING


@pytest.fixture(scope="session")
def failing() -> tuple[str, ...]:
    """The command of a worker whose steps fail once it is ill (failing_worker.py)."""
    return FAILING


@pytest.fixture(scope="session")
def make_load() -> Callable[..., Load]:
    return Load


@pytest.fixture(scope="session")
def make_streams(make_load: Callable[..., Load]) -> Callable[..., Load]:
    """`make_streams(count, seed=...)`: streams that nothing ends before their tokens are out."""

    def make(count: int, *, seed: int) -> Load:
        made = make_load(count, seed=seed)
        for body in made.bodies:
            body["stream"] = True
            body["max_tokens"] = max(24, body["max_tokens"])
            body.pop("stop", None)
        return made

    return make


@pytest.fixture(scope="module")
def expected(load: Any, alone: Cluster) -> Any:
    """The right answers to a module's own `load`."""
    return asyncio.run(load.run(alone.url, concurrency=8))


@pytest.fixture(scope="session")
def until() -> Callable[..., Awaitable[None]]:
    """`await until(happens)`: looks in a thread, and fails if it never does."""

    async def wait(happens: Callable[[], bool], within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not await asyncio.to_thread(happens):
            assert time.monotonic() < deadline, "it never happened"
            await asyncio.sleep(0.005)

    return wait


@contextmanager
def clusters(folders: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(*settings: str) -> Cluster:
        cluster = Cluster(folders.mktemp("cluster"), settings)
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        cluster.close()
        print(cluster.logs())


@pytest.fixture
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Clusters of one test; they end with it, and their logs are shown if it failed."""
    with clusters(tmp_path_factory) as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Cluster]]:
    """As `make_cluster`, for what the tests of a module look at together."""
    with clusters(tmp_path_factory) as make:
        yield make


@pytest.fixture
def make_busy(make_cluster: Callable[..., Cluster]) -> Callable[..., Cluster]:
    """Clusters whose prompts take many steps, and whose leases are short."""
    return lambda *settings: make_cluster(*UNDER_WAY, *settings)


class Kept:
    """One prefill and two decode workers that the tests of a module share: whole and at rest when
    each begins. A fleet that is not at rest after a test fails it, and the next one gets another.
    """

    WORKERS = ("prefill-0", "decode-0", "decode-1")

    def __init__(self, make: Callable[[], Cluster]) -> None:
        self._make = make
        self._cluster: Cluster | None = None

    def whole(self) -> Cluster:
        if self._cluster is None:
            self._cluster = self._make()
            self._cluster.start(1, 2)
        for name in self.WORKERS:
            if not self._cluster.alive(name):
                self._cluster.start_worker(name.split("-")[0], name)
        self._cluster.wait_ready(len(self.WORKERS))
        return self._cluster

    def at_rest(self) -> None:
        assert self._cluster is not None
        try:
            self._cluster.quiet(within_s=5.0)
        except (AssertionError, httpx.HTTPError):
            self.close()
            raise

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            print(self._cluster.logs())
        self._cluster = None


@pytest.fixture(scope="module")
def kept_busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Kept]]:
    """`kept_busy(*settings)`: such a fleet, made as `make_busy` makes one."""
    made: list[Kept] = []

    def make(*settings: str) -> Kept:
        def cluster() -> Cluster:
            return Cluster(tmp_path_factory.mktemp("kept"), (*UNDER_WAY, *settings))

        made.append(Kept(cluster))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker for all tests that leave them whole."""
    settings = ("router.placement=disaggregated", "router.grpc_port=0")
    cluster = Cluster(tmp_path_factory.mktemp("pair"), settings)
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
