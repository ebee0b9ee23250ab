"""The process that compiles what clients send: `python -m baton.router.grammars.grammar_child`.

    stdin   length, JSON: the vocabulary, once; then a constraint each time
    stdout  length, JSON: {"ready": ...}; then {"text": the grammar} or {"error": why}

A schema or pattern may be built to take a processor for minutes or all memory. Here it takes those
of this process: memory is limited, and the router ends the process when its time is over. Knows no
request.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

from baton.router.grammars.schema_fault import path_of_fault
from baton.runtime.errors import InvalidRequest, ModelError
from baton.runtime.grammar.grammar_text import (
    choice_grammar,
    ebnf_grammar,
    enclosed,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    subschemas,
)
from baton.runtime.grammar.matcher import compile_grammar
from baton.runtime.grammar.vocabulary import Vocabulary, read_vocabulary

MEMORY_BYTES = 512 << 20  # for grammars, beyond what the vocabulary takes
HEADER = struct.Struct("<I")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[[^\]]*\])")
_OWN_LOCATION = re.compile(r"at 1\(\d+\): ")  # in the text that is made of a pattern


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a router at once
        signal.signal(number, signal.SIG_IGN)  # the router, which drains, ends this one
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    opening = json.loads(_read(source) or b"{}")
    try:
        vocabulary = read_vocabulary(Path(opening["path"]), opening["size"], opening["ends"])
    except ModelError as error:
        _write(answers, {"ready": False, "error": str(error)})
        return
    _limit_memory()
    _write(answers, {"ready": True})
    while (message := _read(source)) is not None:
        _write(answers, _answer(json.loads(message), vocabulary))


def _answer(constraint: dict[str, Any], vocabulary: Vocabulary) -> dict[str, str]:
    kind, body = constraint["kind"], constraint["body"]
    try:
        text = _text(kind, body)
        if constraint["envelope"]:
            text = enclosed(text, constraint["envelope"])
        compile_grammar(text, vocabulary)
    except InvalidRequest as error:
        return {"error": _explained(kind, body, str(error))}
    except MemoryError:
        return {"error": "it takes too much memory: make it smaller"}
    return {"text": text}


def _text(kind: str, body: Any) -> str:
    if kind == "json_schema":
        return json_schema_grammar(body)
    if kind == "regex":
        return regex_grammar(body)
    if kind == "choice":
        return choice_grammar(body)
    return lark_grammar(body) if kind == "lark" else ebnf_grammar(body)


def _explained(kind: str, body: Any, reason: str) -> str:
    """Name the keyword that is not supported, where in the schema it is, and what to do."""
    found = _UNIMPLEMENTED.search(reason)
    if kind == "regex":
        return _OWN_LOCATION.sub("", reason, count=1)
    if kind != "json_schema":
        return reason
    if found is None:
        if reason.startswith("oneOf constraints"):
            return 'keyword "oneOf": its cases overlap: make them disjoint, or use "anyOf"'
        found_at = path_of_fault(body, reason)
        return reason if found_at is None else f"{reason} (at {found_at[:200]})"
    keys = json.loads(found[1])
    for path, schema in subschemas(body):
        for key in keys:
            if key in schema:
                found_at = f"{path}.{key}".removeprefix(".")
                return f'keyword "{key}" (at {found_at[:200]}) is not supported: leave it out'
    return f"keywords {', '.join(keys)} are not supported: leave them out"


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read(source: BinaryIO) -> bytes | None:
    """Return the next message; None at the end."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return source.read(HEADER.unpack(header)[0])


def _write(answers: BinaryIO, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    answers.write(HEADER.pack(len(body)) + body)
    answers.flush()


if __name__ == "__main__":
    main()
