"""What is asked of a cluster, and the right answers: those of one process, without a fault.

An ask is a greedy completion of fixed length; an answer is the sequence of its tokens. Held-out
conversations of the embedded model's world and words in a row, of many lengths, so that a wrong
block shows as a wrong token. Drawn from a seed alone.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from baton.models import corpus_mix
from chaos.cluster import Cluster

TASKS = ("chat", "facts", "recall", "lists", "arithmetic", "json", "story")
WORDS = ("river", "stone", "seven", "Ada", "blue", "lamp", "counts", "über", "日本", "?")
LENGTHS = (8, 40, 120, 240)  # words
OUTPUTS = (16, 24, 40)  # tokens
LONG_WORDS, LONG_OUTPUT = 500, 24
ASK_S = 120.0


@dataclass(frozen=True, slots=True)
class Ask:
    """`number` names it in reports."""

    number: int
    prompt: str
    max_tokens: int

    def body(self, *, stream: bool = True) -> dict[str, Any]:
        return {
            "model": "small",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,  # so that an answer tells its tokens one by one
            "stream": stream,
        }


def asks(count: int, seed: int) -> list[Ask]:
    """The usual mix."""
    rng = random.Random(seed)
    return [Ask(number, _prompt(rng, number), rng.choice(OUTPUTS)) for number in range(count)]


def long_asks(count: int, seed: int, first: int) -> list[Ask]:
    """Prompts of some hundred words that begin differently: no prefix is shared."""
    rng = random.Random(seed)
    return [
        Ask(first + at, f"{first + at}: {_words(rng, LONG_WORDS)}", LONG_OUTPUT)
        for at in range(count)
    ]


def _prompt(rng: random.Random, number: int) -> str:
    if rng.random() < 0.5:
        talk = corpus_mix.of_task(rng.randrange(10_000), rng.choice(TASKS), held_out=True)
        return "\n".join(message["content"] for message in talk.messages[:-1])
    return f"{number} {_words(rng, rng.choice(LENGTHS))}"


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def right_answers(
    wanted: Sequence[Ask], settings: tuple[str, ...], parent: Path
) -> dict[int, list[str]]:
    """The tokens of each ask from one worker that prefills by itself, one ask at a time."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        cluster = Cluster(Path(folder), (*settings, "router.placement=local"))
        try:
            cluster.start(0, 1)
            return asyncio.run(_answers(cluster.url, wanted))
        finally:
            cluster.close()


async def _answers(url: str, wanted: Sequence[Ask]) -> dict[int, list[str]]:
    found = {}
    async with httpx.AsyncClient(base_url=url, timeout=ASK_S) as client:
        for ask in wanted:
            answer = await client.post("/v1/completions", json=ask.body(stream=False))
            answer.raise_for_status()
            tokens = answer.json()["choices"][0]["logprobs"]["tokens"]
            if len(tokens) != ask.max_tokens:
                raise ValueError(f"ask {ask.number}: {len(tokens)} tokens of {ask.max_tokens}")
            found[ask.number] = tokens
    return found
