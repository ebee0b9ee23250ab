"""The requests to a cluster, and the right answers: those of one process, without a fault.

Half of the asks are greedy streams; the others are of one kind each, so that whatever moves a
request has to take all of it along: its seed, its choices, what penalties count, a stop string.
Held-out conversations of the embedded model's world and words in a row, of many lengths, so that
a wrong block shows as a wrong token. Drawn from a seed alone.
"""

from __future__ import annotations

import asyncio
import enum
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from baton.models.corpus import mix
from chaos.answers import Answer, of_http
from chaos.cluster import Cluster

TASKS = ("chat", "facts", "recall", "lists", "arithmetic", "json", "story")
WORDS = ("river", "stone", "seven", "Ada", "blue", "lamp", "counts", "über", "日本", "?")
LENGTHS = (8, 40, 120, 240)  # words
OUTPUTS = (16, 24, 40)  # tokens
LONG_WORDS, LONG_OUTPUT = 500, 24
ASK_S = 120.0
STOPS = ["can", "will", "have", "was", "has", "is"]  # words that the model likes to say


class Kind(enum.Enum):
    """Streams, but for `WHOLE`."""

    GREEDY = "greedy"
    SEEDED = "seeded"  # sampled
    CHOICES = "choices"  # two of them, sampled with a seed
    PENALTIES = "penalties"  # greedy, with all three
    STOP = "stop"  # greedy, up to a stop string
    WHOLE = "whole"  # greedy, in one piece, which tells the usage
    USAGE = "usage"  # greedy, with the usage at the end of the stream
    UNSEEDED = "unseeded"  # sampled, with a seed that the router draws: no two are alike


_SAMPLED = {"temperature": 0.8, "top_p": 0.95}
_FIELDS: dict[Kind, dict[str, Any]] = {
    Kind.SEEDED: {**_SAMPLED, "seed": 41},
    Kind.CHOICES: {**_SAMPLED, "seed": 42, "n": 2},
    Kind.PENALTIES: {
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    Kind.STOP: {"stop": STOPS},
    Kind.WHOLE: {"stream": False},
    Kind.USAGE: {"stream_options": {"include_usage": True}},
    Kind.UNSEEDED: _SAMPLED,
}


@dataclass(frozen=True, slots=True)
class Ask:
    """`number` names it in reports."""

    number: int
    prompt: str
    max_tokens: int
    kind: Kind = Kind.GREEDY

    def body(self) -> dict[str, Any]:
        return {
            "model": "small",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,  # so that an answer tells its tokens one by one
            "stream": True,
        } | _FIELDS.get(self.kind, {})


def asks(count: int, seed: int) -> list[Ask]:
    """The usual mix."""
    rng, kinds = random.Random(seed), _kinds(count, seed)
    return [
        Ask(number, _prompt(rng, number), rng.choice(OUTPUTS), kinds[number])
        for number in range(count)
    ]


def _kinds(count: int, seed: int) -> list[Kind]:
    """Every other one is greedy, the rest of the other kinds in turn; then shuffled."""
    others = [kind for kind in Kind if kind is not Kind.GREEDY]
    kinds = [
        others[number // 2 % len(others)] if number % 2 else Kind.GREEDY for number in range(count)
    ]
    random.Random(f"kinds {seed}").shuffle(kinds)
    return kinds


def long_asks(count: int, seed: int, first: int) -> list[Ask]:
    """Prompts of some hundred words that begin differently: no prefix is shared."""
    rng = random.Random(seed)
    return [
        Ask(first + at, f"{first + at}: {_words(rng, LONG_WORDS)}", LONG_OUTPUT)
        for at in range(count)
    ]


def _prompt(rng: random.Random, number: int) -> str:
    if rng.random() < 0.5:
        talk = mix.of_task(rng.randrange(10_000), rng.choice(TASKS), held_out=True)
        return "\n".join(message["content"] for message in talk.messages[:-1])
    return f"{number} {_words(rng, rng.choice(LENGTHS))}"


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def right_answers(
    wanted: Sequence[Ask], settings: tuple[str, ...], parent: Path, model: Path | None = None
) -> dict[int, Answer]:
    """Those of one worker that prefills by itself, one ask at a time; each with its usage.
    `model` None: the embedded one."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        cluster = Cluster(Path(folder), (*settings, "router.placement=local"), model=model)
        try:
            cluster.start(0, 1)
            return asyncio.run(_answers(cluster.url, wanted))
        finally:
            cluster.close()


async def _answers(url: str, wanted: Sequence[Ask]) -> dict[int, Answer]:
    found = {}
    async with httpx.AsyncClient(base_url=url, timeout=ASK_S) as client:
        for ask in wanted:
            body = ask.body() | {"stream": False}
            body.pop("stream_options", None)
            heard = await client.post("/v1/completions", json=body)
            heard.raise_for_status()
            found[ask.number] = answer = Answer()
            answer.add(of_http(heard.json()))
            _is_fit(ask, answer)
    return found


def _is_fit(ask: Ask, answer: Answer) -> None:
    """Raises ValueError where its end, or how many choices it has, would show nothing."""
    if len(answer.choices) != ask.body().get("n", 1):
        raise ValueError(f"ask {ask.number} ({ask.kind.value}): {len(answer.choices)} choices")
    for choice in answer.choices.values():
        count, stops = len(choice.tokens), ask.kind is Kind.STOP
        if (count < ask.max_tokens) is not stops or (choice.finish == "stop") is not stops:
            raise ValueError(
                f"ask {ask.number} ({ask.kind.value}): {count} tokens of {ask.max_tokens}, "
                f"ended by {choice.finish!r}: {choice.text!r}"
            )
