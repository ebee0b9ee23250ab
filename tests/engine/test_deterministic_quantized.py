"""The deterministic mode with quantised products, whose kernels for few and for many rows agree in
nearly all of their results: also beside plain products of the same shape."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.models.random_model import make_shaped_model
from tests.support.packed_weights import int8

LAYERS, SIZE, TOKENS = 2, 16, 500
MODULES = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    },
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of three of its four products are as many as their inputs, or twice as many."""
    return make_shaped_model(
        tmp_path_factory.mktemp("plain"),
        layers=LAYERS,
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        ffn=256,
        vocab=4096,
        dtype="bfloat16",
        seed=3,
        context=512,
    )


@pytest.fixture
def stored(plain: Path, tmp_path: Path) -> Callable[[int | None], Path]:
    """A checkpoint in int8 with one scale a row, which bfloat16 does not hold; `kept`: the layer
    that stays plain."""

    def make(kept):
        folder = shutil.copytree(plain, tmp_path / "stored")
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.endswith(MODULES)]:
            if f"layers.{kept}." not in name:
                parts, _ = int8(tensors.pop(name).float())
                module = name.removesuffix("weight")
                tensors |= {f"{module}{part}": tensor for part, tensor in parts.items()}
        save_file(tensors, folder / "model.safetensors")
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": CONFIG}))
        return folder

    return make


@pytest.mark.parametrize(
    ("kept", "dtype"),
    [
        (0, "bfloat16"),
        pytest.param(None, "bfloat16", marks=pytest.mark.nightly),
        pytest.param(0, "float32", marks=pytest.mark.nightly),
        (LAYERS - 1, "float32"),
    ],
)
def test_chunks_change_no_bit_of_an_int8_checkpoint(
    stored: Callable[[int | None], Path], kept: int | None, dtype: str
) -> None:
    options = EngineOptions(blocks=80, block_size=SIZE, dtype=dtype, threads=1, deterministic=True)
    runner = build_runner(stored(kept), options)
    tokens = [(7919 * at + 13) % 4096 for at in range(TOKENS)]
    blocks = -(-TOKENS // SIZE)
    first, second = list(range(blocks)), list(range(blocks, 2 * blocks))
    (whole,) = runner.all_hidden(StepBatch((Slice(tokens, 0, first),)))
    chunks = [
        runner.all_hidden(StepBatch((Slice(tokens[at : at + SIZE], at, second),)))[0]
        for at in range(0, TOKENS, SIZE)
    ]
    assert torch.equal(torch.cat(chunks), whole)
    assert runner.decoder.shortened().layers == (1 if kept is None else LAYERS)
