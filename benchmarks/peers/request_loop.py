"""The peers' side of the pipe: requests in, answers out, one line of JSON each.

Imported by the programs that a peer's own Python runs, so it needs the standard library alone.
The first line out is `{"facts": {...}}`: versions, and the precision that the peer really runs
in. Then each request has one answer:

    {"do": "hold", "prompts": [[id, ...], ...]}   {"seconds": s, "first": [id, ...]}
        take the sequences and step until each has its first token; `seconds` is that time
    {"do": "steps", "count": n}                   {"seconds": [s, ...]}
    {"do": "drop"}                                {}
        end all sequences, untimed

The loop ends with its input. Whatever else is written to the standard output goes to the log.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from typing import Protocol, TextIO


class Engine(Protocol):
    """A peer's engine; all sequences are greedy and go on past the end token."""

    def facts(self) -> dict[str, str]: ...

    def add(self, prompt: list[int]) -> str:
        """Queue a sequence; returns its name."""

    def step(self) -> dict[str, int]:
        """One step of all sequences; returns the newest token of those that drew one."""

    def drop(self) -> None: ...


def options(arguments: list[str] | None = None) -> Namespace:
    """Parse the options of a peer: model folder, threads, GiB of KV, tokens a step."""
    made = ArgumentParser()
    made.add_argument("model")
    made.add_argument("--threads", type=int, required=True)
    made.add_argument("--kv-gib", type=int, required=True)
    made.add_argument("--step-tokens", type=int, required=True)
    made.add_argument("--sequences", type=int, required=True)
    return made.parse_args(arguments)


def serve(make: Callable[[], Engine]) -> None:
    """Answer on the standard output what comes from the standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print there
    engine = make()
    _say(answers, {"facts": engine.facts()})
    answer(engine, sys.stdin, answers)
    engine.drop()


def answer(engine: Engine, requests: Iterable[str], answers: TextIO) -> None:
    """Raises ValueError for a request that is not one of the three."""
    for line in requests:
        request = json.loads(line)
        if request["do"] == "hold":
            _say(answers, _hold(engine, request["prompts"]))
        elif request["do"] == "steps":
            _say(answers, {"seconds": [_timed(engine) for _ in range(request["count"])]})
        elif request["do"] == "drop":
            engine.drop()
            _say(answers, {})
        else:
            raise ValueError(f"{request['do']!r} is none of hold, steps and drop")


def _hold(engine: Engine, prompts: list[list[int]]) -> dict[str, object]:
    start = time.perf_counter()
    names = [engine.add(prompt) for prompt in prompts]
    first: dict[str, int] = {}
    while len(first) < len(names):
        for name, token in engine.step().items():
            first.setdefault(name, token)
    return {"seconds": time.perf_counter() - start, "first": [first[name] for name in names]}


def _timed(engine: Engine) -> float:
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def _say(answers: TextIO, message: dict[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
