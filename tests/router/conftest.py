"""Fixtures of the router's tests: a tiny model folder, fake workers on real gRPC, a router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.proto import worker_pb2, worker_pb2_grpc
from baton.router.server import serve_router
from baton.runtime.config import Config, RouterConfig
from baton.runtime.grpc_links import open_server
from baton.runtime.registry import MemoryRegistry, Role, WorkerRecord

TOKEN = "a secret of the test"
CONTEXT = 4096
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the cat sleeps in the warm sun",
    "ein schneller Fuchs über dem faulen Hund, größer als die Mäuse",
    "чёрная кошка спит на тёплом солнце, 吾輩は猫である。名前はまだ無い 🎉🙂",
    "def next_token(tokens): return hash(tokens) % vocabulary",
]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: the router reads none."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    )
    return folder


def draw(tokens: list[int], seed: int, choice: int, vocabulary: int) -> int:
    """The fake model: a token that depends on every token before it. Never a special token."""
    text = f"{seed} {choice} {tokens}".encode()
    return 3 + int.from_bytes(blake2b(text, digest_size=8).digest()) % (vocabulary - 3)


@dataclass
class Held:
    """A request on the fake worker, with all that was ever sent of it."""

    submit: worker_pb2.Submit
    outputs: list[worker_pb2.Output] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


@dataclass
class FakeWorker:
    """Serves the real Worker service with fake tokens. The switches below may be changed at
    any time; `received` holds every message but heartbeats."""

    worker_id: str
    registry: MemoryRegistry
    vocabulary: int
    role: Role = "decode"
    address: str = ""
    boot: int = 0
    step_s: float = 0.0
    pause_at: int | None = None  # no token from this index on, until it is None
    stop_at: int | None = None  # the token at this index is the model's end token
    fail_at: dict[int, tuple[str, bool]] = field(default_factory=dict)  # used once each
    fail_index: int | None = None  # what failures give as their index, if not the true one
    echo_stale: bool = False  # send duplicates, older attempts and unknown requests too
    silent: bool = False  # sends nothing, not even load
    skip_index: int | None = None  # this output is never sent; once
    blocks: list[bytes] = field(default_factory=list)
    total_blocks: int = 10_000
    cached_tokens: int = 0
    draining: bool = False
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

    async def start(self) -> FakeWorker:
        self.boot += 1
        self._server = open_server(TOKEN)
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
        """As kill -9: links break, and nothing of it is known afterwards."""
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

    async def Link(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        hello = (await anext(aiter(requests))).hello
        self.received.append(worker_pb2.RouterMessage(hello=hello))
        stream: asyncio.Queue[worker_pb2.WorkerMessage | None] = asyncio.Queue()
        stream.put_nowait(worker_pb2.WorkerMessage(welcome=self._welcome(hello)))
        self._resume(hello, stream)
        self._streams.add(stream)
        reading = asyncio.create_task(self._read(requests))
        beating = asyncio.create_task(self._beat(stream))
        try:
            while (message := await stream.get()) is not None:
                if not self.silent:
                    yield message
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the test")
        finally:
            self._streams.discard(stream)
            reading.cancel()
            beating.cancel()
            await asyncio.gather(reading, beating, return_exceptions=True)

    async def WatchBlocks(self, _: Any, context: Any) -> AsyncIterator[Any]:
        feed: asyncio.Queue[worker_pb2.BlockEvents] = asyncio.Queue()
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

    def _welcome(self, hello: worker_pb2.RouterHello) -> worker_pb2.WorkerWelcome:
        return worker_pb2.WorkerWelcome(
            worker_id=self.worker_id,
            boot_id=self.boot_id,
            role=self.role,
            model_fingerprint="f" * 32,
            kv_dtype="float32",
            block_size=16,
            max_context=CONTEXT,
            total_blocks=self.total_blocks,
            vocab_size=self.vocabulary,
            handoff_address=self.address,
            lost=[r.request_id for r in hello.resume if r.request_id not in self.held],
        )

    def _resume(self, hello: worker_pb2.RouterHello, stream: asyncio.Queue[Any]) -> None:
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

    async def _read(self, requests: Any) -> None:
        async for message in requests:
            kind = message.WhichOneof("kind")
            if kind == "heartbeat":
                continue
            self.received.append(message)
            if kind == "submit":
                held = self.held[message.submit.request_id] = Held(message.submit)
                held.task = asyncio.create_task(self._generate(held))
            elif kind == "cancel":
                self._drop(message.cancel.request_id)
            elif kind == "settled":
                for request_id in message.settled.request_ids:
                    self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        held = self.held.pop(request_id, None)
        if held is not None and held.task is not None:
            held.task.cancel()

    async def _beat(self, stream: asyncio.Queue[Any]) -> None:
        while True:
            load = worker_pb2.Load(
                running=len(self.held),
                free_blocks=self.total_blocks,
                total_blocks=self.total_blocks,
                draining=self.draining,
            )
            stream.put_nowait(worker_pb2.WorkerMessage(load=load))
            await asyncio.sleep(0.05)

    async def _generate(self, held: Held) -> None:
        submit = held.submit
        accepted = {c.choice: list(c.accepted) for c in submit.choices}
        going = set(accepted)
        while going:
            await asyncio.sleep(self.step_s)
            step = worker_pb2.StepOutputs()
            for choice in sorted(going):
                index = len(accepted[choice])
                while self.pause_at is not None and index >= self.pause_at:
                    await asyncio.sleep(0.01)
                output = self._output(submit, choice, accepted[choice])
                if output.end:
                    going.discard(choice)
                if output.index == self.skip_index:
                    self.skip_index = None
                else:
                    step.outputs.append(output)
            held.outputs.extend(step.outputs)
            self._emit(step)

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
            output.failure.code, output.failure.detail = code, "told to fail"
            output.failure.retryable = retryable
            return output
        before = [*submit.prompt, *accepted]
        output.token = draw(before, submit.sampling.seed, choice, self.vocabulary)
        if self.stop_at == index:
            output.token = 1
        if index == 0:
            output.cached_tokens = self.cached_tokens
        if submit.sampling.HasField("top_logprobs"):
            output.logprob = -0.5
            for place in range(submit.sampling.top_logprobs):
                output.top.add(token=3 + place, logprob=-1.0 - place)
        accepted.append(output.token)
        if output.token in submit.stop_token_ids:
            output.end = worker_pb2.STOP
        elif len(accepted) >= submit.max_tokens:
            output.end = worker_pb2.LENGTH
        return output

    def _emit(self, step: worker_pb2.StepOutputs) -> None:
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
                    stray.request_id = "nobody"
                stream.put_nowait(worker_pb2.WorkerMessage(outputs=lies))


@dataclass
class Running:
    """A router under test: its URL, its registry, its fake workers, and a client."""

    url: str
    registry: MemoryRegistry
    workers: dict[str, FakeWorker]
    http: httpx.AsyncClient
    vocabulary: int
    serving: asyncio.Task[None]

    async def ready(self) -> None:
        await eventually(lambda: self._ready())

    async def _ready(self) -> bool:
        return (await self.http.get("/readyz")).status_code == 200

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "the quick brown", **fields}
        return await self.http.post("/v1/completions", json=body)


async def eventually(condition: Callable[[], Any], limit_s: float = 30) -> None:
    """Wait until the condition holds; fail if it never does."""
    async with asyncio.timeout(limit_s):
        while True:
            found = condition()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.01)


FAST = RouterConfig(
    port=0, link_heartbeat_s=0.1, link_silence_s=2.0, link_grace_s=0.5, max_attempts=4
)


@asynccontextmanager
async def running_router(
    model_folder: Path,
    workers: tuple[str, ...] = ("decode-0",),
    config: RouterConfig = FAST,
    wait: bool = True,
) -> AsyncIterator[Running]:
    """A router on a port given by the system, and fake workers named "<role>-<number>"."""
    registry = MemoryRegistry()
    vocabulary = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    async with AsyncExitStack() as stack:
        made = {}
        for name in workers:
            role: Role = "prefill" if name.startswith("prefill") else "decode"
            made[name] = FakeWorker(name, registry, vocabulary, role=role)
            await made[name].start()
            stack.push_async_callback(made[name].die)
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve_router(
                replace(Config(), router=config),
                model_folder=model_folder,
                model_name="tiny",
                registry=registry,
                token=TOKEN,
                ready=url.set_result,
            )
        )
        stack.push_async_callback(_stop, serving)
        waited: set[asyncio.Future[Any]] = {serving, url}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        if not url.done():
            serving.result()
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url.result(), timeout=60))
        running = Running(url.result(), registry, made, http, vocabulary, serving)
        if wait:
            await running.ready()
        yield running


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def router(model_folder: Path) -> Callable[..., Any]:
    """`async with router(workers=(...), config=...) as running`."""

    def start(**options: Any) -> Any:
        return running_router(model_folder, **options)

    return start


@pytest.fixture
def fast_config() -> RouterConfig:
    return FAST


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., Awaitable[None]]:
    return eventually


@pytest.fixture(name="draw")
def draw_fixture() -> Callable[..., int]:
    return draw
