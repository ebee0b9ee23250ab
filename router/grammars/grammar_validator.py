"""Validates constraints in a process of its own, with limits on time, memory and size.

    check ─▶ kept answer?  ─ no ─▶ queue (bounded) ─▶ the process ─▶ grammar, or what is wrong
                                     └─ too slow, dead or unreadable: killed, started again

Answers are kept. That none came in time, or the process ended, is kept for seconds: the cause may
be the machine, and a constraint that stops each process must not be tried for each request.

The process is started with the first constraint: without one it costs nothing. One constraint is
validated at a time. The event loop never waits for it. Owns the process; `close` ends it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.proto import worker_pb2
from baton.router.grammars.constraint import Constraint, message_key
from baton.router.grammars.grammar_child import HEADER
from baton.runtime import logs, metrics
from baton.runtime.errors import Cancelled, InvalidRequest, ModelError, Overloaded, Unavailable
from baton.runtime.grammar.vocabulary import vocabulary_digest

START_S = 60.0  # to read a large vocabulary
ANSWER_S = 3.0  # for one constraint
MAX_QUEUE = 64
KEPT_ANSWERS = 512
UNANSWERED_S = 30.0  # in which a constraint that had no answer is not tried again
MAX_ANSWER_BYTES = 4 << 20

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class VocabularyFile:
    """Where a model's vocabulary is read from; `size` counts its token ids."""

    path: Path
    size: int
    ends: Sequence[int]


class GrammarValidator:
    """A validator of constraints for one model. The event loop calls all methods."""

    def __init__(self, vocabulary: VocabularyFile, answer_s: float = ANSWER_S) -> None:
        self._vocabulary = vocabulary
        self._answer_s = answer_s
        self._digest: bytes | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._open: dict[bytes, asyncio.Task[dict[str, Any]]] = {}  # queued, or in the process
        self._waiters: Counter[bytes] = Counter()  # callers of each
        self._kept: OrderedDict[bytes, tuple[dict[str, Any], float]] = OrderedDict()

    async def grammar(self, constraint: Constraint) -> worker_pb2.Grammar:
        """Return the grammar as workers get it. Raises InvalidRequest that names the field and what
        is wrong, Overloaded if too many constraints wait, Unavailable if the process cannot run."""
        message = constraint.message()
        key = message_key(message)
        answer = self._kept_answer(key)
        if answer is None:
            answer = await self._asked(key, message)
        if "error" in answer:
            metrics.GRAMMARS_REFUSED.inc()
            raise InvalidRequest(f"{constraint.field}: {answer['error']}", constraint.field)
        return worker_pb2.Grammar(text=answer["text"], vocabulary=self._own_digest())

    async def close(self) -> None:
        for asked in self._open.values():
            asked.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)
        await self._end()

    def _own_digest(self) -> bytes:
        if self._digest is None:
            source = self._vocabulary
            self._digest = vocabulary_digest(source.path, source.size, source.ends)
        return self._digest

    async def _asked(self, key: bytes, message: bytes) -> dict[str, Any]:
        """Join the validation of this constraint, or queue it. A caller that leaves does not end
        one that has begun: the process would be in the middle of an answer."""
        asked = self._open.get(key)
        if asked is None:
            if len(self._open) >= MAX_QUEUE:
                raise Overloaded(
                    f"{len(self._open)} grammars wait to be validated: try again later"
                )
            asked = self._open[key] = asyncio.create_task(self._answered(key, message))
            asked.add_done_callback(lambda over: over.cancelled() or over.exception())
        self._waiters[key] += 1
        try:
            return await asyncio.shield(asked)  # bounded by ANSWER_S for each that waits
        finally:
            self._waiters[key] -= 1
            if not self._waiters[key]:
                del self._waiters[key]

    async def _answered(self, key: bytes, message: bytes) -> dict[str, Any]:
        try:
            async with self._turn:
                if key not in self._waiters:
                    raise Cancelled("no request waits for this constraint any more")
                answer, seconds = await self._validated(message)
            self._keep(key, answer, seconds)
            return answer
        finally:
            del self._open[key]

    def _kept_answer(self, key: bytes) -> dict[str, Any] | None:
        answer, until_s = self._kept.get(key, (None, 0.0))
        if answer is None or time.monotonic() >= until_s:
            return None
        self._kept.move_to_end(key)
        return answer

    def _keep(self, key: bytes, answer: dict[str, Any], seconds: float) -> None:
        self._kept[key] = answer, time.monotonic() + seconds
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT_ANSWERS:
            self._kept.popitem(last=False)

    async def _validated(self, message: bytes) -> tuple[dict[str, Any], float]:
        """Ask the process. Return the answer and for how many seconds it holds. A process that is
        cut off in the middle of an answer is ended."""
        process = await self._running()
        started_s = time.perf_counter()
        whole = False
        try:
            async with asyncio.timeout(self._answer_s):
                answer = await _exchange(process, message)
            _require(answer, "error" if "error" in answer else "text", str)
            whole = True
        except TimeoutError:
            log.warning("grammar validation timed out", seconds=self._answer_s)
            reason = f"it takes over {self._answer_s:g} s to compile: make it smaller"
            return {"error": reason}, UNANSWERED_S
        except (asyncio.IncompleteReadError, OSError):
            log.warning("grammar process lost", status=process.returncode)
            return {"error": "it is too complex to compile: make it smaller"}, UNANSWERED_S
        finally:
            metrics.GRAMMAR_SECONDS.observe(time.perf_counter() - started_s)
            if not whole:
                await self._end()
        return answer, math.inf

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        source = self._vocabulary
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "baton.router.grammars.grammar_child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "RAYON_NUM_THREADS": "1"},
        )
        opening = {"path": str(source.path), "size": source.size, "ends": [*source.ends]}
        ready = False
        try:
            async with asyncio.timeout(START_S):
                answer = await _exchange(process, json.dumps(opening).encode())
            _require(answer, "ready", bool)
            ready = answer["ready"]
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            raise Unavailable("grammars cannot be validated now: try again later") from error
        finally:
            if not ready:
                await self._end()
        if not ready:
            raise ModelError(answer["error"])
        log.info("grammar process started", pid=process.pid)
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _exchange(process: asyncio.subprocess.Process, message: bytes) -> dict[str, Any]:
    """Send a message and return the answer. Raises OSError or IncompleteReadError if the process
    ends, which a cancel leaves unread, and Unavailable if the answer is not readable."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(HEADER.pack(len(message)) + message)
    await process.stdin.drain()
    (length,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
    if length > MAX_ANSWER_BYTES:
        raise _unreadable(f"{length} bytes")
    try:
        answer = json.loads(await process.stdout.readexactly(length))
    except ValueError as error:
        raise _unreadable("no JSON") from error
    if not isinstance(answer, dict):
        raise _unreadable("no object")
    return answer


def _require(answer: dict[str, Any], key: str, kind: type) -> None:
    if not isinstance(answer.get(key), kind):
        raise _unreadable(f"no {key!r}")


def _unreadable(fault: str) -> Unavailable:
    log.warning("grammar answer unreadable", fault=fault)
    return Unavailable(
        f"the process that validates grammars gave an unreadable answer ({fault}): try again later"
    )
