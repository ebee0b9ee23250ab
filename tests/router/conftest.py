"""Fixtures of the router's tests: a tiny model folder, scripted workers on real gRPC, a router;
and a dispatcher alone, with links that only write down what they are sent."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import grpc.aio
import httpx
import pytest
import tokenizers
from opentelemetry.context import Context
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.proto import client_pb2_grpc, worker_pb2
from baton.router.circuits import Circuits
from baton.router.dispatch import Dispatcher
from baton.router.generation import Generation
from baton.router.generation_request import GenerationRequest
from baton.router.placement import WorkerView
from baton.router.server import serve_router
from baton.runtime.config import Config, RouterConfig
from baton.runtime.links import LinkClosed
from baton.runtime.registry import MemoryRegistry, Role
from baton.simulation.scripted_worker import ScriptedWorker, draw

TEMPLATES = Path(__file__).with_name("templates")
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


@pytest.fixture(scope="session")
def tool_templates() -> dict[str, str]:
    """Chat templates that do with tools what those of known families do, by their forms."""
    return {path.stem: path.read_text() for path in TEMPLATES.glob("*.jinja")}


@pytest.fixture(scope="session")
def tool_model(
    model_folder: Path,
    tool_templates: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Path]:
    """`tool_model(name)`: a model folder with that template. `special` tokens are added."""

    def make(name: str, special: tuple[str, ...] = ()) -> Path:
        folder = tmp_path_factory.mktemp(name)
        tokenizer = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
        tokenizer.add_special_tokens(list(special))
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((model_folder / "config.json").read_text())
        config["vocab_size"] = tokenizer.get_vocab_size()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "chat_template": tool_templates[name],
                    "bos_token": "<s>",
                    "eos_token": "<|im_end|>",
                }
            )
        )
        return folder

    return make


@dataclass
class Running:
    """A router under test: its URL, its registry, its scripted workers, and a client."""

    url: str
    registry: MemoryRegistry
    workers: dict[str, ScriptedWorker]
    http: httpx.AsyncClient
    vocabulary: int
    serving: asyncio.Task[None]
    grpc_address: str = ""  # where the router's configuration asks for gRPC

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
    **switches: Any,
) -> AsyncIterator[Running]:
    """A router on a port given by the system, and scripted workers named "<role>-<number>", all
    of them with these switches."""
    registry = MemoryRegistry()
    vocabulary = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    async with AsyncExitStack() as stack:
        made = {}
        for name in workers:
            role: Role = "prefill" if name.startswith("prefill") else "decode"
            made[name] = ScriptedWorker(name, registry, vocabulary, TOKEN, role=role, **switches)
            await made[name].start()
            stack.push_async_callback(made[name].die)
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        grpc_addresses: list[str] = []
        serving = asyncio.create_task(
            serve_router(
                replace(Config(), router=config),
                model_folder=model_folder,
                model_name="tiny",
                registry=registry,
                token=TOKEN,
                ready=url.set_result,
                grpc_ready=grpc_addresses.append,
            )
        )
        stack.push_async_callback(_stop, serving)
        waited: set[asyncio.Future[Any]] = {serving, url}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        if not url.done():
            serving.result()
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url.result(), timeout=60))
        running = Running(
            url.result(), registry, made, http, vocabulary, serving, "".join(grpc_addresses)
        )
        if wait:
            await running.ready()
        yield running


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def router(model_folder: Path) -> Callable[..., Any]:
    """`async with router(workers=(...), config=...) as running`; `folder`: another model; what
    else is given are switches of the workers."""

    def start(folder: Path = model_folder, **options: Any) -> Any:
        return running_router(folder, **options)

    return start


@pytest.fixture
def grpc_router(router: Callable[..., Any]) -> Callable[..., Any]:
    """`async with grpc_router(...) as (running, stub)`: as `router`, with a gRPC client."""

    @asynccontextmanager
    async def start(config: RouterConfig = FAST, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
        async with (
            router(config=replace(config, grpc_port=0), **options) as running,
            grpc.aio.insecure_channel(running.grpc_address) as channel,
        ):
            yield running, client_pb2_grpc.InferenceStub(channel)

    return start


@pytest.fixture
def refused() -> Callable[[Any], Awaitable[Any]]:
    """`await refused(call)`: the error that a gRPC call ends with."""

    async def error_of(call: Any) -> Any:
        with pytest.raises(grpc.aio.AioRpcError) as found:
            async for _ in call:
                pass
        return found.value

    return error_of


@pytest.fixture
def fast_config() -> RouterConfig:
    return FAST


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., Awaitable[None]]:
    return eventually


@pytest.fixture(name="draw")
def draw_fixture() -> Callable[..., int]:
    return draw


SCENE = RouterConfig(stream_buffer_messages=16, max_attempts=3)


class FakeLink:
    """`submits` and `cancels` of what it was `sent`."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.boot_id = worker_id.encode()
        self.up = True
        self.hung = False
        self.placed_tokens = self.placed_requests = 0
        self.load = worker_pb2.Load()
        self.sent: list[worker_pb2.RouterMessage] = []
        self.settled: list[str] = []
        self.confirmed: list[worker_pb2.Resume] = []

    def send(self, message: worker_pb2.RouterMessage) -> None:
        if not self.up:
            raise LinkClosed("down")
        self.sent.append(message)

    def settle(self, request_id: str) -> None:
        self.settled.append(request_id)

    def confirm(self, accepted: worker_pb2.Resume) -> None:
        self.confirmed.append(accepted)

    def submits(self) -> list[worker_pb2.Submit]:
        return [m.submit for m in self.sent if m.WhichOneof("kind") == "submit"]

    def cancels(self) -> list[tuple[str, int]]:
        cancels = [m.cancel for m in self.sent if m.WhichOneof("kind") == "cancel"]
        return [(cancel.request_id, cancel.attempt) for cancel in cancels]


class FakeFleet:
    """Workers, decode workers unless their name says "prefill"; alike but for what a test
    changes."""

    def __init__(self, *names: str) -> None:
        self.links = {name: FakeLink(name) for name in names}
        self.waiting = 0
        self.total_blocks = 100
        self.fingerprints: dict[str, str] = {}  # where they are not "f"
        self.circuits = Circuits(random.Random(1))
        self.expected = 0.0
        self.vocab_size = 1000
        self.matched = 0
        self.known = True  # the index is rebuilt

    def rebuilt(self) -> bool:
        return self.known

    def expected_s(self) -> float:
        return self.expected

    def link(self, worker_id: str) -> FakeLink | None:
        return self.links.get(worker_id)

    def of_boot(self, boot_id: bytes) -> FakeLink | None:
        return self.links.get(boot_id.decode())

    def room(self) -> int:
        takes = [e for e in self.links.values() if e.up and not e.load.draining]
        return sum(_role(link) == "decode" for link in takes) * max(0, 512 - self.waiting)

    def match(self, views: object, tokens: Sequence[int], salt: bytes, known: object) -> None:
        self.matched += 1  # nobody holds anything

    def views(self) -> list[WorkerView]:
        roles = {link.boot_id: _role(link) for link in self.links.values() if link.up}
        passed_over = self.circuits.passed_over(roles, asyncio.get_running_loop().time())
        return [
            WorkerView(
                link.worker_id,
                link.boot_id,
                _role(link),
                "h:1",
                (self.fingerprints.get(link.worker_id, "f"), "d", 16),
                total_blocks=self.total_blocks,
                free_blocks=self.total_blocks,
                waiting=self.waiting,
                passed_over=link.boot_id in passed_over,
                draining=link.load.draining,
            )
            for link in self.links.values()
            if link.up
        ]


def _role(link: FakeLink) -> str:
    return "prefill" if link.worker_id.startswith("prefill") else "decode"


class Scene:
    """The dispatcher alone, with links that only write down what they are sent."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.fleet = FakeFleet(*(names or ("decode-0",)))
        self.dispatcher = Dispatcher(cast(Any, self.fleet), replace(SCENE, **settings))
        self.dispatcher.place_wait_s = 0.2

    async def start(
        self, request_id: str = "r", within_s: float = 3600, **fields: Any
    ) -> Generation:
        deadline_s = asyncio.get_running_loop().time() + within_s
        defaults: dict[str, Any] = {"max_tokens": 9, "stop_token_ids": (1,)}
        request = GenerationRequest(
            prompt=(5, 6, 7), sampling=worker_pb2.Sampling(seed=1), **{**defaults, **fields}
        )
        return await self.dispatcher.start(request, request_id, Context(), deadline_s)

    def link(self, number: int = 0) -> Any:
        return self.fleet.links[f"decode-{number}"]

    def give(self, *outputs: worker_pb2.Output, number: int = 0) -> None:
        self.dispatcher.take(self.link(number), worker_pb2.StepOutputs(outputs=outputs))

    def tell(self, *outputs: worker_pb2.Output, number: int = 0, **asked: Any) -> None:
        """Of whom a request asks now; `outputs` travel in the same message."""
        word = worker_pb2.Asked(**{"request_id": "r", "attempt": 1, **asked})
        message = worker_pb2.StepOutputs(outputs=outputs, asked=[word])
        self.dispatcher.take(self.link(number), message)

    async def settle_down(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def output(index: int, token: int | None = 9, **fields: Any) -> worker_pb2.Output:
    made = worker_pb2.Output(request_id="r", attempt=1, index=index, token=token)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def failed(code: str, retryable: bool, **fields: Any) -> worker_pb2.Output:
    made = output(0, None, end=worker_pb2.FAILED, **fields)
    made.failure.code, made.failure.retryable = code, retryable
    return made


@pytest.fixture(name="scene_of")
def scene_of_fixture() -> Callable[..., Scene]:
    """`scene_of("decode-0", max_attempts=2)`: a dispatcher, and links to those workers."""
    return Scene


@pytest.fixture(name="output")
def output_fixture() -> Callable[..., worker_pb2.Output]:
    return output


@pytest.fixture(name="failed")
def failed_fixture() -> Callable[..., worker_pb2.Output]:
    """`failed(code, retryable)`: the output that says so."""
    return failed
