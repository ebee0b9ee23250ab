"""A worker of scripted faults: the real Worker service, tokens drawn from a hash, no engine.

What the router is held against: it misbehaves on the wire in every way that its switches name,
while the gRPC server, the messages and the router are the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import grpc

from baton.proto import worker_pb2, worker_pb2_grpc
from baton.runtime.grpc_links import open_server
from baton.runtime.links import LINK_PROTOCOL_VERSION
from baton.runtime.registry import MemoryRegistry, Role, WorkerRecord


def draw(tokens: list[int], seed: int, choice: int, vocabulary: int) -> int:
    """The fake model: a token that depends on every token before it. Never a special token."""
    text = f"{seed} {choice} {tokens}".encode()
    return 3 + int.from_bytes(blake2b(text, digest_size=8).digest()) % (vocabulary - 3)


Context = grpc.aio.ServicerContext[Any, Any]
Stream = asyncio.Queue[worker_pb2.WorkerMessage | None]  # None: the link breaks


@dataclass
class Held:
    """A request on the fake worker, with all that was ever sent of it."""

    submit: worker_pb2.Submit
    outputs: list[worker_pb2.Output] = field(default_factory=list)
    unwanted: set[int] = field(default_factory=set)  # choices that were cancelled
    task: asyncio.Task[None] | None = None


@dataclass
class ScriptedWorker:
    """Serves the real Worker service with fake tokens. The switches below may be changed at
    any time; `received` holds every message but heartbeats."""

    worker_id: str
    registry: MemoryRegistry
    vocabulary: int
    token: str
    role: Role = "decode"
    address: str = ""
    boot: int = 0
    step_s: float = 0.0
    pause_at: int | None = None  # no token from this index on, until it is None
    says: list[list[int]] = field(default_factory=list)  # what each choice says, then its end
    stop_at: int | None = None  # the token at this index is the model's end token
    fail_at: dict[int, tuple[str, bool]] = field(default_factory=dict)  # used once each
    fail_index: int | None = None  # what failures give as their index, if not the true one
    preempted_at: int | None = None  # this output reports a preemption
    echo_stale: bool = False  # send duplicates, older attempts and unknown requests too
    silent: bool = False  # sends nothing, not even load
    skip_index: int | None = None  # this output is never sent; once
    blocks: list[bytes] = field(default_factory=list)
    tells_blocks: bool = True  # else a watcher of them waits
    total_blocks: int = 10_000
    max_context: int = 4096
    cached_tokens: int = 0
    loses_handoffs: bool = False  # of prompts: it computes them itself in the end
    withholds_scores: bool = False  # of prompts
    draining: bool = False
    reason: str = ""
    overdue_ms: int = 0
    waiting: int = 0
    pool: dict[str, int] = field(default_factory=dict)  # its blocks by state, as it reports them
    served: int = 0
    received: list[worker_pb2.RouterMessage] = field(default_factory=list)
    held: dict[str, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._server: grpc.aio.Server | None = None
        self._streams: set[asyncio.Queue[worker_pb2.WorkerMessage | None]] = set()
        self._block_sequence = 0
        self._feeds: set[asyncio.Queue[worker_pb2.BlockEvents]] = set()

    @property
    def boot_id(self) -> bytes:
        return blake2b(f"{self.worker_id} {self.boot}".encode(), digest_size=16).digest()

    def seen(self, kind: str) -> list[Any]:
        return [getattr(m, kind) for m in self.received if m.WhichOneof("kind") == kind]

    async def start(self) -> ScriptedWorker:
        self.boot += 1
        self._server = open_server(self.token)
        add_servicer: Any = worker_pb2_grpc.add_WorkerServicer_to_server
        add_servicer(self, self._server)
        port = self._server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        self.registry.announce(
            WorkerRecord(self.worker_id, self.boot_id.hex(), self.role, self.address, "", "tiny", 1)
        )
        return self

    async def die(self) -> None:
        """End as by kill -9: links break, and all its state is lost."""
        for held in self.held.values():
            if held.task is not None:
                held.task.cancel()
        self.held.clear()
        self.break_links()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def break_links(self) -> None:
        """End the streams; requests stay parked and go on generating."""
        for stream in self._streams:
            stream.put_nowait(None)
        self._streams.clear()

    def publish(self, stored: list[bytes], skip: int = 0) -> None:
        self._block_sequence += 1 + skip
        self.blocks += stored
        for feed in self._feeds:
            feed.put_nowait(
                worker_pb2.BlockEvents(
                    boot_id=self.boot_id, sequence=self._block_sequence, stored=b"".join(stored)
                )
            )

    # -- the Worker service ---------------------------------------------------------------------

    async def Link(
        self, requests: AsyncIterator[worker_pb2.RouterMessage], context: Context
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        hello = (await anext(aiter(requests))).hello
        self.received.append(worker_pb2.RouterMessage(hello=hello))
        stream: Stream = asyncio.Queue()
        stream.put_nowait(worker_pb2.WorkerMessage(hello=self._hello(hello)))
        self._resume(hello, stream)
        self._streams.add(stream)
        reading = asyncio.create_task(self._read(requests, stream))
        beating = asyncio.create_task(self._beat(stream))
        try:
            while (message := await stream.get()) is not None:
                if not self.silent:
                    yield message
            if not reading.done():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the test")
        finally:
            self._streams.discard(stream)
            reading.cancel()
            beating.cancel()
            await asyncio.gather(reading, beating, return_exceptions=True)

    async def WatchBlocks(
        self, _: worker_pb2.WatchBlocksRequest, context: Context
    ) -> AsyncIterator[worker_pb2.BlockEvents]:
        feed: asyncio.Queue[worker_pb2.BlockEvents] = asyncio.Queue()
        while not self.tells_blocks:
            # Tests set the switch while this call waits.
            await asyncio.sleep(0.01)
        self._feeds.add(feed)
        try:
            yield worker_pb2.BlockEvents(
                boot_id=self.boot_id,
                sequence=self._block_sequence,
                snapshot=True,
                snapshot_end=True,
                stored=b"".join(self.blocks),
            )
            while True:
                yield await feed.get()
        finally:
            self._feeds.discard(feed)

    def _hello(self, hello: worker_pb2.RouterHello) -> worker_pb2.WorkerHello:
        return worker_pb2.WorkerHello(
            protocol_version=LINK_PROTOCOL_VERSION,
            worker_id=self.worker_id,
            boot_id=self.boot_id,
            role=self.role,
            model_fingerprint="f" * 32,
            kv_dtype="float32",
            block_size=16,
            max_context=self.max_context,
            total_blocks=self.total_blocks,
            vocab_size=self.vocabulary,
            unknown_requests=[r.request_id for r in hello.resume if r.request_id not in self.held],
        )

    def _resume(self, hello: worker_pb2.RouterHello, stream: Stream) -> None:
        named = {resume.request_id: resume for resume in hello.resume}
        for request_id in set(self.held) - set(named):
            self._drop(request_id)
        for request_id, resume in named.items():
            following = {c.choice: c.index for c in resume.next}
            held = self.held.get(request_id)
            again = [
                output
                for output in (held.outputs if held else [])
                if output.index >= following.get(output.choice, 1 << 30)
            ]
            stream.put_nowait(
                worker_pb2.WorkerMessage(outputs=worker_pb2.StepOutputs(outputs=again))
            )

    async def _read(
        self, requests: AsyncIterator[worker_pb2.RouterMessage], stream: Stream
    ) -> None:
        async for message in requests:
            kind = message.WhichOneof("kind")
            if kind == "heartbeat":
                continue
            self.received.append(message)
            if kind == "submit":
                held = self.held[message.submit.request_id] = Held(message.submit)
                held.task = asyncio.create_task(self._generate(held))
            elif kind == "cancel":
                self._cancel(message.cancel)
            elif kind == "settled":
                for request_id in message.settled.request_ids:
                    self._drop(request_id)
        if not self.silent:
            stream.put_nowait(None)  # the router has left: so does this side

    def _cancel(self, cancel: worker_pb2.Cancel) -> None:
        if not cancel.choices:
            self._drop(cancel.request_id)
        elif cancel.request_id in self.held:
            self.held[cancel.request_id].unwanted.update(cancel.choices)

    def _drop(self, request_id: str) -> None:
        held = self.held.pop(request_id, None)
        if held is not None and held.task is not None:
            held.task.cancel()

    async def _beat(self, stream: Stream) -> None:
        while True:
            load = worker_pb2.Load(
                running=len(self.held),
                free_blocks=self.total_blocks,
                total_blocks=self.total_blocks,
                draining=self.draining,
                not_ready_reason=self.reason,
                overdue_ms=self.overdue_ms,
                waiting=self.waiting,
                completed_requests=self.served,
                open_requests=len(self.held) + self.waiting,
                active_requests=len(self.held),
                pool=worker_pb2.PoolBlocks(**self.pool),
            )
            stream.put_nowait(worker_pb2.WorkerMessage(load=load))
            # A worker reports its load at this period.
            await asyncio.sleep(0.05)

    async def _generate(self, held: Held) -> None:
        submit = held.submit
        accepted = {c.choice: list(c.accepted) for c in submit.choices}
        going = set(accepted)
        if self.loses_handoffs and submit.placement.candidates:
            lost = worker_pb2.PrefillSwitch(request_id=submit.request_id, attempt=submit.attempt)
            self.emit(worker_pb2.StepOutputs(prefill_switches=[lost]))
        while going:
            await asyncio.sleep(self.step_s)  # A step takes this long.
            going -= held.unwanted
            step = worker_pb2.StepOutputs()
            for choice in sorted(going):
                index = len(accepted[choice])
                while self.pause_at is not None and index >= self.pause_at:
                    # Tests change the switch while this request waits.
                    await asyncio.sleep(0.01)
                output = self._output(submit, choice, accepted[choice])
                if output.end:
                    going.discard(choice)
                if output.index == self.skip_index:
                    self.skip_index = None
                else:
                    step.outputs.append(output)
            held.outputs.extend(step.outputs)
            self.emit(step)

    def _output(
        self, submit: worker_pb2.Submit, choice: int, accepted: list[int]
    ) -> worker_pb2.Output:
        index = len(accepted)
        output = worker_pb2.Output(
            request_id=submit.request_id, attempt=submit.attempt, choice=choice, index=index
        )
        if index in self.fail_at:
            code, retryable = self.fail_at.pop(index)
            output.end = worker_pb2.FAILED
            output.index = index if self.fail_index is None else self.fail_index
            output.failure.code, output.failure.detail = code, "scripted failure"
            output.failure.retryable = retryable
            return output
        before = [*submit.prompt, *accepted]
        output.token = draw(before, submit.sampling.seed, choice, self.vocabulary)
        if self.says:
            output.token = (*self.says[choice], 1)[index]
        if self.stop_at == index:
            output.token = 1
        if self.preempted_at == index:
            output.timeline.preempted = True
        if index == 0:
            output.cached_tokens = self.cached_tokens
            if choice == 0 and submit.sampling.HasField("prompt_logprobs"):
                output.prompt_logprobs.CopyFrom(self._scores(submit))
        if submit.sampling.HasField("top_logprobs"):
            output.logprob = -0.5
            for rank in range(submit.sampling.top_logprobs):
                output.top.add(token=3 + rank, logprob=-1.0 - rank)
        accepted.append(output.token)
        if output.token in submit.stop_token_ids:
            output.end = worker_pb2.STOP
        elif len(accepted) >= submit.max_tokens:
            output.end = worker_pb2.LENGTH
        return output

    def _scores(self, submit: worker_pb2.Submit) -> worker_pb2.PromptLogprobs:
        found = worker_pb2.PromptLogprobs()
        if self.withholds_scores:
            return found
        for token in submit.prompt[1:]:
            found.logprobs.append(-0.5 - token)
            found.ranks.append(1 + token)
            for rank in range(submit.sampling.prompt_logprobs):
                found.top_tokens.append(3 + rank)
                found.top_logprobs.append(-0.25 - rank)
        return found

    def emit(self, step: worker_pb2.StepOutputs) -> None:
        for stream in self._streams:
            stream.put_nowait(worker_pb2.WorkerMessage(outputs=step))
            if self.echo_stale and step.outputs:
                lies = worker_pb2.StepOutputs()
                for output in step.outputs:
                    lies.outputs.append(output)  # a duplicate
                    old = lies.outputs.add()
                    old.CopyFrom(output)
                    old.attempt, old.index, old.token = output.attempt + 7, output.index + 1, 5
                    stray = lies.outputs.add()
                    stray.CopyFrom(old)
                    stray.request_id = "unknown"
                stream.put_nowait(worker_pb2.WorkerMessage(outputs=lies))
