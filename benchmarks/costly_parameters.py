"""Measure the delay that valid requests of the highest cost cause to other clients.

    python -m benchmarks.costly_parameters [--seconds 20] [--only top_p choices] [--json FILE]

`baton serve` with two decode workers and a random model with the vocabulary of Qwen (151,936
tokens). Other clients ask for short greedy answers at random moments, first alone, then beside
eight requests of one kind that are under way at every moment:

    p50_ms, p99_ms           of other clients, alone
    p99_ratio_KIND           theirs beside that kind, over p99_ms
    answered_KIND            requests of the kind that were answered
    failed_KIND              of other clients, those without an answer
    hangs                    workers that routers took for hung, in all

The client is this process, on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from baton.models.random_model import make_shaped_model
from benchmarks.figures.report import Figure, at_most, parser, report

VOCAB = 151_936
COSTLY = 8
RATE = 2.0  # requests of other clients a second
TOKENS = 16
START_S = 240.0
ANSWER_S = 120.0
MAX_RATIO = 2.0
_READY = re.compile(r"http://[\w.:\[\]]+")
_HANGS = re.compile(r'^baton_hangs_total\{role="decode"\} (\S+)$', re.MULTILINE)
LONG = "the same words again and again " * 150
KINDS: dict[str, dict[str, Any]] = {
    "choices": {"n": 16, "temperature": 1.0},
    "bias": {"logit_bias": {str(token): 0.5 for token in range(1024)}, "temperature": 0},
    "stop_tokens": {"stop_token_ids": list(range(3000, 3064)), "temperature": 0},
    "logprobs": {"logprobs": 20, "temperature": 0},
    "long_prompts": {"prompt": LONG},  # what `penalties` costs without the penalties
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "prompt": LONG},
    "top_p": {"top_p": 0.9999, "temperature": 2.0},
    "top_k": {"top_k": VOCAB - 1, "temperature": 1.0},
}


@dataclass(slots=True)
class ProbeResults:
    took_s: list[float] = field(default_factory=list)
    failed: int = 0
    costly: int = 0
    refused: str = ""  # what a costly request was refused with, the last one

    def percentile_ms(self, part: float) -> float:
        return 1000 * sorted(self.took_s)[int(part * (len(self.took_s) - 1))]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of `baton serve` with a model in `folder`. Raises RuntimeError if it does not come
    up."""
    model = make_shaped_model(
        folder / "model",
        layers=4,
        hidden=512,
        heads=8,
        kv_heads=4,
        head_dim=64,
        ffn=1536,
        vocab=VOCAB,
        dtype="bfloat16",
        seed=1,
    )
    command = ["-P", "-m", "baton.deploy.cli.main", "serve", str(model), "--port", "0"]
    command += ["--launcher", "process", "--prefill", "1", "--decode", "2", "--blocks", "1500"]
    with open(folder / "log", "wb+") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "--set", "worker.threads=1"],
            env=os.environ | {"XDG_RUNTIME_DIR": str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield _url(process, folder / "log")
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    until_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until_s:
        found = _READY.search(log.read_text())
        if found:
            try:
                if httpx.get(f"{found[0]}/readyz", timeout=5).status_code == 200:
                    return found[0]
            except httpx.HTTPError:
                pass  # it does not listen yet
        time.sleep(0.5)  # `baton serve` reports its readiness in its output alone
    raise RuntimeError(f"baton serve did not start:\n{log.read_text()[-3000:]}")


class Clients:
    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=500)
        self._http = httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits)
        self._count = 0
        self._model = ""

    async def hangs(self) -> float:
        found = _HANGS.search((await self._http.get("/metrics")).text)
        return float(found[1]) if found else 0.0

    async def phase(
        self, asked: dict[str, Any] | None, seconds: float, dice: random.Random
    ) -> ProbeResults:
        """Other clients for so long, beside requests with `asked`."""
        if not self._model:
            self._model = (await self._http.get("/v1/models")).json()["data"][0]["id"]
        seen, until_s = ProbeResults(), time.monotonic() + seconds
        costly = [self._costly(seen, asked, until_s) for _ in range(COSTLY)] if asked else []
        async with asyncio.TaskGroup() as asking:
            for work in costly:
                asking.create_task(work)
            while time.monotonic() < until_s:
                asking.create_task(self._other(seen))
                await asyncio.sleep(dice.expovariate(RATE))  # Requests come at random moments.
        return seen

    async def close(self) -> None:
        await self._http.aclose()

    async def _other(self, seen: ProbeResults) -> None:
        began_s = time.monotonic()
        answer = await self._ask({"temperature": 0}, TOKENS)
        if answer is not None and answer.status_code == 200:
            seen.took_s.append(time.monotonic() - began_s)
        else:
            seen.failed += 1

    async def _costly(self, seen: ProbeResults, asked: dict[str, Any], until_s: float) -> None:
        while time.monotonic() < until_s:
            answer = await self._ask(asked, 3 * TOKENS)
            if answer is not None and answer.status_code == 200:
                seen.costly += 1
            else:
                seen.refused = "no answer" if answer is None else answer.text[:200]
                # A client that was refused asks again later.
                await asyncio.sleep(0.2)

    async def _ask(self, asked: dict[str, Any], tokens: int) -> httpx.Response | None:
        self._count += 1
        body = {"model": self._model, "max_tokens": tokens, "ignore_eos": True}
        body |= {"prompt": "", **asked}
        body["prompt"] = f"{self._count} {body['prompt']}"
        try:
            return await self._http.post("/v1/completions", json=body)
        except httpx.HTTPError:
            return None


async def measure(url: str, options: argparse.Namespace) -> tuple[list[Figure], list[str]]:
    clients, dice, notes = Clients(url), random.Random(1), []
    await clients.phase(None, 3.0, dice)  # steps' times are known then
    alone = await clients.phase(None, options.seconds, dice)
    figures = [
        Figure("p50_ms", alone.percentile_ms(0.5), "ms"),
        Figure("p99_ms", alone.percentile_ms(0.99), "ms"),
    ]
    for kind in options.only or KINDS:
        beside = await clients.phase(KINDS[kind], options.seconds, dice)
        ratio = beside.percentile_ms(0.99) / alone.percentile_ms(0.99) if beside.took_s else 1e9
        figures += [
            at_most(f"p99_ratio_{kind}", ratio, MAX_RATIO),
            Figure(f"answered_{kind}", beside.costly),
            at_most(f"failed_{kind}", beside.failed, 0),
        ]
        if beside.refused:
            notes.append(f"{kind}: {beside.refused}")
    figures.append(at_most("hangs", await clients.hangs(), 0))
    await clients.close()
    return figures, notes


def main() -> None:
    options_parser = parser((__doc__ or "").partition("\n")[0])
    options_parser.add_argument("--seconds", type=float, default=20.0, help="of each kind")
    options_parser.add_argument("--only", nargs="+", choices=KINDS, help="these kinds alone")
    options = options_parser.parse_args()
    temporary = tempfile.TemporaryDirectory(prefix="baton-benchmark-")
    with temporary as folder, served(Path(folder)) as url:
        figures, notes = asyncio.run(measure(url, options))
    report(figures, options.json, notes)


if __name__ == "__main__":
    main()
