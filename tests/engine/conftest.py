"""Small random models, stories over a runner, and checks under Triton's interpreter, for tests."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from baton.engine.spec.model_spec import ModelSpec, read_spec
from tests.support import small_models
from tests.support.cuda_runner_pair import RunnerPair
from tests.support.json_values import Json, JsonObject
from tests.support.machine_speed import slowness
from tests.support.small_models import Reference

HERE = Path(__file__).parent
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "eos_token_id": 2,
}


# Checks of single kernels under the interpreter, 15 to 30 s each. Whole steps, products and weights
# run in `make test`.
SLOW_CHECKS = {"attention_checks", "draw_checks", "codes_checks", "latent_checks"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SLOW_CHECKS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.nightly)


def neighbour(name: str) -> ModuleType:
    """The module in the file of that name beside this one; tests import no other by its name."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws does not depend on those that ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            made[name] = small_models.make_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def models_by_cost() -> list[object]:
    """Every small model; those that are no representatives run in `make nightly`."""
    return [
        name
        if name in small_models.REPRESENTATIVES
        else pytest.param(name, marks=pytest.mark.nightly)
        for name in small_models.MODELS
    ]


@pytest.fixture(scope="session", params=models_by_cost())
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


@pytest.fixture(scope="session")
def qwen3(references: Callable[[str], Reference]) -> Reference:
    return references("qwen3")


@pytest.fixture
def pair(qwen3: Reference) -> RunnerPair:
    return RunnerPair(qwen3.folder)


@pytest.fixture(scope="session")
def parity() -> ModuleType:
    """What runs the checks, in this process."""
    return neighbour("parity")


@pytest.fixture(scope="session")
def triton_parity(parity: ModuleType) -> ModuleType:
    """The module of that name, in this process: its checks, not its kernels, can be tested."""
    return neighbour("triton_parity")


def folder_of_run(folders: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run of pytest share."""
    own = folders.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def checked_by_interpreter(names: tuple[str, ...], folder: Path) -> dict[str, JsonObject]:
    """Every check of `parity.py names` by its own name, run under Triton's interpreter: in another
    process, since that is chosen when Triton is imported. The first of the processes that share
    `folder` runs them, the others read what it found."""
    file = folder / f"{'-'.join(names)}.json"
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            done = subprocess.run(
                [
                    sys.executable,
                    "-P",
                    HERE / "parity.py",
                    *names,
                    "--device=cpu",
                    f"--json={file}",
                ],
                env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=250 * slowness(),
            )
            assert file.exists(), done.stdout + done.stderr
    found: list[JsonObject] = json.loads(file.read_text())
    return {each["name"]: each for each in found}


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., ModelSpec]:
    """Reads a `config.json` that differs from a small Llama's; "absent" leaves a field out."""

    def read(generation: JsonObject | None = None, context: int = 0, **changes: Json) -> ModelSpec:
        values = {**_CONFIG, **changes}
        values = {name: value for name, value in values.items() if value != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(values))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_spec(tmp_path, context)

    return read


def checks_of(*names: str) -> Callable[..., dict[str, JsonObject]]:
    """A fixture: what `checked_by_interpreter` finds. Scripts share a process, whose imports take
    seconds, as far as two workers of pytest can each start one."""

    @pytest.fixture(scope="session")
    def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JsonObject]:
        return checked_by_interpreter(names, folder_of_run(tmp_path_factory))

    return checks


product_checks = checks_of("triton", "fixed")
attention_checks = checks_of("attention")
step_checks = checks_of("step")
draw_checks = checks_of("draw")
codes_checks = checks_of("codes")
latent_checks = checks_of("latent")
