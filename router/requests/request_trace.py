"""The trace of one request: where its time went, from its first byte to that of its answer.

    receive ─ parse ─ render ─ tokenize ─ validate ─ admit ─ place ─ send ─ [workers] ─ return
      ─ deliver ─ detokenize ─ (decode, without a stream) ─ write                the critical path
    first token received ─ fetch ─ verify ─ decode queue ─ step ─ ...            after it

The phases of the critical path follow each other without a gap, so they add up to the time to the
first byte of the answer. Workers report durations alone; what a message's way took is the time
between its sending and the first output, less what the worker reported, and half of it is counted
for each direction. Holds no text. Owned by the router's event loop, whose clock it reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.proto import worker_pb2
from baton.runtime.telemetry.timeline import MAX_OFFERS, Timeline, read

NAME_BYTES = 8  # of a block's identity, kept in a trace
MAX_NAMES = 64  # of a prompt, unless it has more than MAX_NAMES * MAX_NAMED_TOKENS tokens
MAX_NAMED_TOKENS = 512  # that one name stands for
_MAX_TRANSPORT = 64  # characters
_MAX_BYTES = 1 << 53  # a number that all readers of JSON know exactly

Mark = Callable[[str], None]


def unmarked(_: str) -> None:
    """Mark nothing: the caller keeps no trace."""


@dataclass(frozen=True, slots=True)
class FetchedOffer:
    """One offer of a fetch: when it was received, read and verified, in seconds since the request's
    first byte. `hidden_s` of that time had passed when the first token of its attempt came: it was
    hidden behind the prefill."""

    begin_s: float
    landed_s: float
    verified_s: float
    blocks: int
    hidden_s: float


class RequestTrace:
    """`begun_s` is when the first byte was received, on the loop's clock; `tenant` the digest of
    its API key. `path` is the critical path, `after` begins with the first token."""

    def __init__(self, begun_s: float | None = None, tenant: bytes = b"") -> None:
        self._clock = asyncio.get_running_loop().time
        now_s = self._clock()
        self.begun_s = now_s if begun_s is None else begun_s
        self.begun_wall_s = time.time() - now_s + self.begun_s
        self.tenant = tenant
        self.path = Timeline(self.begun_s)
        self.after: Timeline | None = None
        self.answered = False
        self.preempted = False
        self.worker = ""  # the decode worker that has it, or had it last
        self.offers: list[FetchedOffer] = []
        self.read_bytes = self.reads = 0
        self.transport = ""  # of its last fetch
        self.named_tokens, self.block_names = 0, b""  # see `record_prompt`
        self._receipt_s = 0.0  # when that worker received it
        self._sent = False  # and no output has come since

    def member(self) -> RequestTrace:
        """Return the trace of one prompt of several, with what has passed so far."""
        own = RequestTrace(self.begun_s, self.tenant)
        own.begun_wall_s = self.begun_wall_s
        own.path.phases = [replace(phase) for phase in self.path.phases]
        own.path.at_s = self.path.at_s
        return own

    def mark(self, name: str) -> None:
        """End a phase of the critical path, unless that is over."""
        if not self.answered:
            self.path.mark(name, self._clock())

    @property
    def _current(self) -> Timeline:
        return self.path if self.after is None else self.after

    def record_sent(self, worker_id: str) -> None:
        """Record that it was placed and sent to a decode worker."""
        self._current.mark("place", self._clock())
        self.worker, self._sent = worker_id, True

    def record_prompt(self, identities: Sequence[bytes], block_tokens: int) -> None:
        """Record the prompt's blocks, so that advice can tell which prompts share a prefix: the
        beginning of the identity of every block that ends `named_tokens` after the one before.
        Identities are keyed hashes: they tell no text. Only those of the first attempt count."""
        if self.named_tokens or not identities:
            return
        step = 1
        while 2 * step * block_tokens <= MAX_NAMED_TOKENS and len(identities) > step * MAX_NAMES:
            step *= 2
        self.named_tokens = step * block_tokens
        self.block_names = b"".join([name[:NAME_BYTES] for name in identities[step - 1 :: step]])

    def record_loss(self) -> None:
        """Record that its worker has failed it, or is lost."""
        self._current.mark("lost attempt" if self._sent else "decode", self._clock())
        self._sent = False

    def record_output(self, message: worker_pb2.Timeline) -> None:
        """Record an output that carries a worker's timeline."""
        now_s, current = self._clock(), self._current
        before_s = current.at_s
        phases = read(message, self.worker)
        if not phases:
            current.mark("worker", now_s)
        else:
            way = "send" if self._sent else "return"
            half_s = current.insert(phases, now_s, before=way, after="return")
            if self._sent:
                self._receipt_s = before_s + half_s
        self._sent = False
        self.preempted = self.preempted or message.preempted
        if message.HasField("fetch"):
            self._take_fetch(message.fetch, before_s - self.begun_s)
        if self.after is None:
            self.after = Timeline(now_s)

    @property
    def wants_output(self) -> bool:
        """Return whether the next output is the first of a worker."""
        return self._sent

    def record_written(self) -> None:
        """Record that the first part of the answer is written now, if there was any output yet."""
        if self.after is not None:
            self.mark("write")
            self.answered = True

    def _take_fetch(self, fetch: worker_pb2.FetchTimes, first_s: float) -> None:
        """Take the offers of a fetch; `first_s` is when the output before came: the first token."""
        columns = (fetch.begin_us, fetch.landed_us, fetch.verified_us, fetch.blocks)
        if max(map(len, columns)) > MAX_OFFERS or len(set(map(len, columns))) > 1:
            return
        shift_s, now_s = self._receipt_s - self.begun_s, self._clock() - self.begun_s
        for *micros, blocks in zip(*columns, strict=True):
            begin_s, landed_s, verified_s = (min(shift_s + us / 1e6, now_s) for us in micros)
            hidden_s = max(0.0, min(verified_s, first_s) - begin_s)
            self.offers.append(FetchedOffer(begin_s, landed_s, verified_s, blocks, hidden_s))
        del self.offers[: -4 * MAX_OFFERS]
        self.read_bytes = min(self.read_bytes + fetch.bytes, _MAX_BYTES)
        self.reads += fetch.reads
        self.transport = fetch.transport[:_MAX_TRANSPORT]
