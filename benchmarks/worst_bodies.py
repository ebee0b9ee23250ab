"""How long the worst bodies that a router reads hold its loop: each step of reading them is a turn.

    python -m benchmarks.worst_bodies [--rounds 9] [--json FILE]

A chat at all bounds of router/requests/request_parser.py at once, token ids, text full of
escapes. Each is read in turns with the heap as a process starts (`live`), and as a router process
has it (`set apart`): what its start has made is left out of Python's collections. The
figures are the best and the worst of each step; beside other work the worst is also that of others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import orjson

from baton.proto import worker_pb2
from baton.router import server
from baton.router.requests.loop_budget import LoopBudget
from baton.router.requests.openai_schema import (
    MAX_MESSAGES,
    MAX_TOKEN_VALUES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from baton.router.requests.prompt_limits import ContextLimits
from baton.router.requests.request_parser import MAX_CONTAINERS, MAX_STRINGS
from baton.router.requests.schema_body import MAX_VALUES, Body
from baton.router.requests.validator import Validator
from baton.router.templates.chat_template import ChatTemplate
from baton.runtime import process_memory
from baton.runtime.config import RouterConfig
from baton.runtime.errors import InvalidRequest
from baton.runtime.identity import chain, root
from baton.simulation.fleet.byte_tokenizer import ByteTokenizer

assert server  # what a router process has loaded is what its collections look through

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
LIMITS = ContextLimits(max_context=MAX_TOKEN_VALUES, vocab_size=1 << 17)
PLACED = (1 << 17, 1 << 20)  # tokens of a prompt
SPARE = 700  # of each bound, for what frames the rest
TEMPLATE = """{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% for c in m.tool_calls or [] -%}
{{ '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}"""


def _chat(messages: list[dict[str, Any]]) -> bytes:
    """Return a chat with tools whose schemas use up what the messages leave of the bounds."""
    plain = orjson.dumps({"model": "m", "messages": messages})
    outside = b"".join(plain.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    strings = MAX_STRINGS - plain.replace(b'\\"', b"").count(b'"') // 2 - SPARE
    containers = MAX_CONTAINERS - outside.count(b"[") - outside.count(b"{") - SPARE
    commas = MAX_VALUES - outside.count(b",") - SPARE
    tools: list[dict[str, Any]] = []
    while (objects := min(containers, strings, commas, 7000)) > 0:
        texts = max(0, min(strings - objects, commas - objects, 900))
        properties: dict[str, Any] = {f"p{n}": {} for n in range(objects)}
        properties["e"] = {"enum": ["e"] * texts}
        schema = {"type": "object", "properties": properties}
        function = {"name": f"f{len(tools)}", "parameters": schema}
        tools.append({"type": "function", "function": function})
        containers, commas = containers - objects, commas - objects - texts
        strings -= objects + texts
    return orjson.dumps({"model": "m", "messages": messages, "tools": tools})


def _calls() -> bytes:
    arguments = orjson.dumps({"a": [[]] * 3, "b": 1}).decode()
    function = {"name": "f", "arguments": arguments}
    return _chat(
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": f"c{n}", "type": "function", "function": function}],
            }
            for n in range(MAX_MESSAGES)
        ]
    )


def _parts() -> bytes:
    part = {"type": "text", "text": "a"}
    return _chat([{"role": "user", "name": "n", "content": [part]}] * MAX_MESSAGES)


def _tokens(field: str, digits: bytes) -> bytes:
    room = RouterConfig().max_body_bytes - 100
    count = min(MAX_TOKEN_VALUES, room // (len(digits) + 1))
    return b'{"model":"m","%s":[' % field.encode() + b",".join([digits] * count) + b"]}"


def _escapes() -> bytes:
    text = b'\\\\\\"' * ((RouterConfig().max_body_bytes - 100) // 4)
    return b'{"model":"m","prompt":"' + text + b'"}'


BODIES: dict[str, tuple[Callable[[], bytes], type[Body]]] = {
    "a chat of calls at all bounds": (_calls, ChatRequest),
    "a chat of parts at all bounds": (_parts, ChatRequest),
    "a million token ids": (lambda: _tokens("prompt", b"123"), CompletionRequest),
    "a million long token ids": (lambda: _tokens("prompt", b"1234567"), CompletionRequest),
    "a million ids to detokenize": (lambda: _tokens("tokens", b"123"), DetokenizeRequest),
    "8 MiB of escapes": (_escapes, CompletionRequest),
}


class Timed(LoopBudget):
    """Seconds of each piece, by the name of its work."""

    def __init__(self) -> None:
        super().__init__()
        self.longest: dict[str, float] = {}

    async def run(
        self, size: int, work: Callable[_Given, _Made], *given: _Given.args, **named: _Given.kwargs
    ) -> _Made:
        name = getattr(work, "__name__", "count")
        begun_s = time.perf_counter()
        try:
            return work(*given, **named)
        finally:
            took_s = time.perf_counter() - begun_s
            self.longest[name] = max(self.longest.get(name, 0.0), took_s)


async def _read(body: bytes, shape: type[Body], validator: Validator) -> None:
    request = await validator.parsed(body, shape)
    if isinstance(request, ChatRequest):
        await validator.chat(request, LIMITS)
    elif isinstance(request, CompletionRequest):
        await validator.completion(request, LIMITS)
    elif isinstance(request, DetokenizeRequest):
        await validator.text(request, LIMITS)


def read_once(body: bytes, shape: type[Body]) -> dict[str, float]:
    """Milliseconds of the longest piece of each step."""
    template = ChatTemplate(TEMPLATE, {})
    validator = Validator("m", ByteTokenizer(), template, frozenset({7}), max_choices=4)
    timed = validator.turns = Timed()
    with contextlib.suppress(InvalidRequest):  # what is refused late has been read too
        asyncio.run(_read(body, shape, validator))
    return {name: 1000 * seconds for name, seconds in timed.longest.items()}


def hand_over(tokens: int) -> dict[str, float]:
    """Milliseconds of what placing a prompt of so many tokens takes beside its parsing."""
    prompt = tuple([123] * tokens)
    begun_s = time.perf_counter()
    chain(b"k" * 32, root(b"k" * 32, "f", "d"), prompt, 16)
    named_s = time.perf_counter()
    worker_pb2.Submit(prompt=prompt).SerializeToString()
    sent_s = time.perf_counter()
    return {"identities": 1000 * (named_s - begun_s), "message": 1000 * (sent_s - named_s)}


@contextlib.contextmanager
def _set_apart() -> Iterator[None]:
    process_memory.freeze_startup_objects()
    try:
        yield
    finally:
        gc.unfreeze()


def measure(rounds: int) -> Iterable[dict[str, Any]]:
    cases: dict[str, Callable[[], dict[str, float]]] = {}
    for name, (make, shape) in BODIES.items():
        body = make()
        # mypy infers no type for the default of a lambda
        cases[name] = lambda body=body, shape=shape: read_once(body, shape)  # type: ignore[misc]
    for tokens in PLACED:
        # mypy infers no type for the default of a lambda
        cases[f"{tokens} tokens placed"] = lambda tokens=tokens: hand_over(tokens)  # type: ignore[misc]
    for name, run in cases.items():
        took: dict[str, dict[str, list[float]]] = {"live": {}, "set apart": {}}
        for _ in range(rounds):
            for how, steps in took.items():
                with _set_apart() if how == "set apart" else contextlib.nullcontext():
                    for step, ms in (*run().items(), *run().items()):
                        steps.setdefault(step, []).append(ms)
        for how, steps in took.items():
            for step, times in steps.items():
                yield {
                    "body": name,
                    "step": step,
                    "heap": how,
                    "best_ms": round(min(times), 1),
                    "worst_ms": round(max(times), 1),
                }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    rows = []
    for row in measure(given.rounds):
        rows.append(row)
        if row["best_ms"] >= 1:
            print("{body:32} {step:14} {heap:8} {best_ms:8} {worst_ms:8}".format(**row), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
