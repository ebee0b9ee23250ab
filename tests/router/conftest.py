"""Fixtures of the router's tests: a tiny model folder, scripted workers on real gRPC, a router;
and the scenes in the files beside: a dispatcher, a fleet or a link alone."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.proto import client_pb2_grpc, worker_pb2
from baton.router.server import serve_router
from baton.runtime.config import Config, RouterConfig
from baton.runtime.registry import MemoryRegistry, Role
from baton.runtime.registry_client import ThreadedRegistry
from baton.simulation.fleet.scripted_worker import ScriptedWorker, draw

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # tests import no module beside them; their scenes come from here
import dispatch_scene  # noqa: E402
from fleet_scene import FleetScene  # noqa: E402
from link_scene import LinkScene  # noqa: E402

TEMPLATES = HERE / "templates"
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
                registry=ThreadedRegistry(registry),
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


@pytest.fixture
def scene_of() -> Callable[..., dispatch_scene.Scene]:
    """`scene_of("decode-0", max_attempts=2)`: a dispatcher, and links to those workers."""
    return dispatch_scene.Scene


@pytest.fixture
def output() -> Callable[..., worker_pb2.Output]:
    return dispatch_scene.output


@pytest.fixture
def failed() -> Callable[..., worker_pb2.Output]:
    """`failed(code, retryable)`: the output that says so."""
    return dispatch_scene.failed


@pytest.fixture
def fleet_scene(monkeypatch: pytest.MonkeyPatch) -> type[FleetScene]:
    """`fleet_scene()`: a fleet, and stubs of workers behind memory links."""
    monkeypatch.setattr("baton.router.fleet.fleet.REGISTRY_POLL_S", 0.02)
    return FleetScene


@pytest.fixture
def link_scene() -> type[LinkScene]:
    """`link_scene(link_grace_s=60.0)`: one worker's link; the test holds its far end."""
    return LinkScene
