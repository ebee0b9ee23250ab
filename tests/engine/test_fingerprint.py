from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.fingerprint import model_fingerprint
from baton.runtime.errors import ModelError
from tests.support.small_models import Reference


@pytest.fixture
def folder(qwen3: Reference, tmp_path: Path) -> Path:
    return shutil.copytree(qwen3.folder, tmp_path / "model")


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_is_32_hex_digits_and_the_same_for_a_copy(qwen3: Reference, folder: Path) -> None:
    found = model_fingerprint(folder)
    assert len(found) == 32
    assert int(found, 16) >= 0
    assert found == model_fingerprint(qwen3.folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.2.self_attn.q_norm.weight",
    ],
)
def test_a_tuned_tensor_of_the_same_shape_differs(folder: Path, name: str) -> None:
    before = model_fingerprint(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] + 1e-3 * torch.randn_like(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    assert model_fingerprint(folder) != before


def test_facts_of_the_config_differ_and_the_rest_does_not(folder: Path) -> None:
    before = model_fingerprint(folder)
    change_config(folder, transformers_version="9.9", use_cache=False, eos_token_id=[5, 6])
    assert model_fingerprint(folder) == before
    change_config(folder, rms_norm_eps=1e-4)
    assert model_fingerprint(folder) != before


def test_both_forms_of_rope_are_one_model(folder: Path) -> None:
    before = model_fingerprint(folder)
    change_config(folder, rope_parameters=None, rope_theta=1000000.0, rope_scaling=None)
    assert model_fingerprint(folder) == before


def test_shards_do_not_matter(qwen3: Reference, tmp_path: Path) -> None:
    qwen3.model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert model_fingerprint(tmp_path) == model_fingerprint(qwen3.folder)


@pytest.mark.parametrize("kept", [0, 5, 100, 5000])
def test_a_cut_file_is_refused_by_name(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match="model.safetensors"):
        model_fingerprint(folder)


def test_what_is_made_of_the_weights_at_load_differs(folder: Path) -> None:
    found = {model_fingerprint(folder, quantization=made) for made in ("none", "int8", "int4")}
    assert len(found) == 3
    assert model_fingerprint(folder) in found


def test_a_draft_model_makes_another_kv(folder: Path) -> None:
    """Its KV lies in the same blocks: workers with unlike drafts exchange none."""
    alone = model_fingerprint(folder)
    drafted = {model_fingerprint(folder, draft=draft) for draft in (None, "a", "b")}
    assert len(drafted) == 3 and alone in drafted
