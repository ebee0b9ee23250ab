"""Fixtures of the router's tests: a tiny model folder, a router with scripted workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.proto import client_pb2_grpc
from baton.router.dispatch.active_request import ActiveRequest, OutputToken
from baton.router.templates import template_meter
from baton.runtime.config import RouterConfig
from tests.support.client_certificates import ClientCertificates
from tests.support.fleet_scene import FleetScene
from tests.support.machine_speed import slowness
from tests.support.router_process import (
    FAST_ROUTER,
    RouterAndStub,
    RunningRouter,
    StartGrpcRouter,
    StartRouter,
    running_router,
)

TEMPLATES = Path(__file__).parent / "templates"
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


@pytest.fixture(autouse=True)
def long_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may take as much longer as this processor does: a collection of all the objects
    that the tests' libraries make counts as a rendering's own time."""
    limit_s = template_meter.TIME_LIMIT_S * slowness()
    monkeypatch.setattr(template_meter, "TIME_LIMIT_S", limit_s)


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


@pytest.fixture
def router(model_folder: Path) -> StartRouter:
    """`async with router(workers=(...), config=...) as running`; `folder`: another model; what
    else is given are switches of the workers."""

    def start(
        folder: Path = model_folder, **options: Any
    ) -> AbstractAsyncContextManager[RunningRouter]:
        return running_router(folder, **options)

    return start


@pytest.fixture
def grpc_router(router: StartRouter) -> StartGrpcRouter:
    """`async with grpc_router(...) as (running, stub)`: as `router`, with a gRPC client."""

    @asynccontextmanager
    async def start(
        config: RouterConfig = FAST_ROUTER, **options: Any
    ) -> AsyncIterator[RouterAndStub]:
        async with (
            router(config=replace(config, grpc_port=0), **options) as running,
            grpc.aio.insecure_channel(running.grpc_address) as channel,
        ):
            yield running, client_pb2_grpc.InferenceStub(channel)

    return start


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The choice of each token that the router has accepted."""
    choices: list[int] = []
    put = ActiveRequest.put

    def noted(self: ActiveRequest, output: OutputToken) -> bool:
        if output.token is not None:
            choices.append(output.choice)
        return put(self, output)

    monkeypatch.setattr(ActiveRequest, "put", noted)
    return choices


@pytest.fixture
def fleet_scene(monkeypatch: pytest.MonkeyPatch) -> type[FleetScene]:
    """`fleet_scene()`: a fleet, and stubs of workers behind memory links."""
    monkeypatch.setattr("baton.router.fleet.fleet.REGISTRY_POLL_S", 0.02)
    return FleetScene


@pytest.fixture
def certificates(tmp_path: Path) -> ClientCertificates:
    """Return a folder `router.tls` with a certificate for clients."""
    return ClientCertificates(tmp_path / "clients")
