"""Which heads a target refuses at start-up, by name, and what identifies a head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.fingerprint import model_fingerprint
from baton.engine.execution.engine_options import DraftKind, EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.memory.kv_pool import KvPool, block_bytes
from baton.engine.spec.eagle3_spec import read_eagle3_spec
from baton.engine.spec.model_spec import read_spec
from baton.runtime.errors import ConfigError, ModelError
from tests.support.eagle3_heads import HeadShape, Layout, ReferenceHead, save_head
from tests.support.json_values import JsonObject
from tests.support.small_models import Reference

SHAPE = HeadShape(199, 64, (1, 2, 3), draft_vocab=60)
LAYOUTS: list[Layout] = ["midlayer", "speculators"]


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return save_head(ReferenceHead(SHAPE), tmp_path / "head", "midlayer")


def load(target: Path, head: Path, kind: DraftKind = "eagle3") -> None:
    options = EngineOptions(blocks=8, dtype="float32", draft_folder=head, draft_kind=kind)
    build_runner(target, options)


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (replace(SHAPE, vocab=200), "its vocabulary has 200 tokens, not 199"),
        (replace(SHAPE, target_hidden=32), "its target's hidden size is 32, not 64"),
        (replace(SHAPE, layers=(1, 2, 7)), r"reads the layers \[1, 2, 7\] of a model of 3 layers"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_of_another_target_is_refused(
    qwen3: Reference, tmp_path: Path, layout: Layout, shape: HeadShape, text: str
) -> None:
    folder = save_head(ReferenceHead(shape), tmp_path / "head", layout)
    with pytest.raises(ModelError, match=text):
        load(qwen3.folder, folder)


def test_default_layers_that_coincide_are_refused(
    references: Callable[[str], Reference], tmp_path: Path
) -> None:
    target = references("qwen3-moe-mixed").folder  # 4 layers: 2, 2 and 1
    folder = save_head(ReferenceHead(SHAPE), tmp_path / "head", "midlayer", eagle_config=None)
    with pytest.raises(ModelError, match=r"reads the layers \[2, 2, 1\] of a model of 4 layers"):
        load(target, folder)


@pytest.mark.parametrize("named", [True, False])
def test_an_eagle_head_is_refused_as_eagle3(qwen3: Reference, head: Path, named: bool) -> None:
    """By its configuration, or by what its fc reads."""
    config = json.loads((head / "config.json").read_text())
    if named:
        config["architectures"] = ["EagleLlamaForCausalLM"]
        del config["draft_vocab_size"]
        (head / "config.json").write_text(json.dumps(config))
    else:
        change_tensors(head, **{"fc.weight": torch.zeros(64, 128)})
    with pytest.raises(ModelError, match="holds an EAGLE head, whose fc reads"):
        load(qwen3.folder, head)


def test_a_draft_model_is_refused_as_a_head(qwen3: Reference) -> None:
    with pytest.raises(ModelError, match="holds no EAGLE-3 head.* draft=FOLDER"):
        load(qwen3.folder, qwen3.folder)


def test_a_head_is_refused_as_a_draft_model(qwen3: Reference, head: Path) -> None:
    with pytest.raises(ModelError, match="holds an EAGLE-3 head, which is no draft model"):
        load(qwen3.folder, head, "draft")


def test_a_head_whose_fc_reads_too_little_is_refused(qwen3: Reference, head: Path) -> None:
    change_tensors(head, **{"fc.weight": torch.zeros(64, 160)})
    with pytest.raises(ModelError, match="its fc reads 160 numbers of a token, not 3 x 64"):
        load(qwen3.folder, head)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mask_hidden": torch.zeros(1, 1, 192)}, "mask_hidden .* is no part of an EAGLE-3 head"),
        ({"d2t": torch.full((60,), 150)}, "names 60 tokens from 150 to 209"),
        ({"d2t": -torch.arange(60)}, "names 1 tokens from 0 to 0, and 60 of 0 to 198"),
        ({"d2t": None}, "tensor d2t is missing, and the draft vocabulary has 60 of 199"),
        ({"norm.weight": None}, "tensor norm.weight is in none"),
    ],
)
def test_wrong_tensors_are_refused_by_name(
    qwen3: Reference, head: Path, changes: dict[str, torch.Tensor | None], text: str
) -> None:
    change_tensors(head, **changes)
    with pytest.raises(ModelError, match=text):
        load(qwen3.folder, head)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"norm_before_fc": True}, "norm_before_fc: True is not supported"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "is not a list of 3 layers"),
        ({"draft_vocab_size": 300}, "300 exceeds the maximum of 199"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_configurations_that_are_not_computed_are_refused(
    qwen3: Reference, tmp_path: Path, layout: Layout, changes: JsonObject, text: str
) -> None:
    folder = save_head(ReferenceHead(SHAPE), tmp_path / "head", layout, **changes)
    with pytest.raises(ModelError, match=text):
        load(qwen3.folder, folder)


def test_a_head_of_two_layers_is_refused(qwen3: Reference, tmp_path: Path) -> None:
    folder = save_head(ReferenceHead(SHAPE), tmp_path / "head", "midlayer", num_hidden_layers=2)
    with pytest.raises(ModelError, match="2: an EAGLE-3 head has one layer"):
        load(qwen3.folder, folder)


def test_both_layouts_name_the_same_layers(tmp_path: Path) -> None:
    made = ReferenceHead(SHAPE)
    specs = [read_eagle3_spec(save_head(made, tmp_path / each, each)) for each in LAYOUTS]
    assert specs[0] == specs[1]
    assert specs[0].layers_of(32) == (1, 2, 3)
    assert replace(specs[0], state_layers=()).layers_of(32) == (2, 16, 29)


def test_the_fingerprint_covers_weights_and_layers(head: Path, tmp_path: Path) -> None:
    first = model_fingerprint(head)
    other = shutil.copytree(head, tmp_path / "other")
    assert model_fingerprint(other) == first
    change_tensors(other, d2t=torch.arange(60))
    assert model_fingerprint(other) != first
    moved = save_head(
        ReferenceHead(SHAPE), tmp_path / "moved", "speculators", norm_before_residual=True
    )
    same = save_head(ReferenceHead(SHAPE), tmp_path / "same", "speculators")
    shutil.copy(moved / "model.safetensors", same)
    assert model_fingerprint(moved) != model_fingerprint(same)


def test_a_heads_group_is_one_slab_with_its_features(qwen3: Reference, head: Path) -> None:
    spec, layer = read_spec(qwen3.folder), read_eagle3_spec(head).layer
    pool = KvPool(spec, 3, 8, torch.bfloat16, draft=layer)
    assert pool.draft is not None and pool.draft.features is not None
    size = 8 * (2 * 2 * 16 + 64) * 2
    assert pool.slab_groups[1] == (1, size) and block_bytes(layer, 8, torch.bfloat16) == size
    assert pool.draft.features.shape == (3, 8, 64)
    pool.draft.features[1], pool.draft.tensor[1] = 1.5, 2.5
    pool.copy_block(1, 2)
    assert bool((pool.draft.features[2] == 1.5).all() and (pool.draft.tensor[2] == 2.5).all())
    assert not pool.bytes_view()[0].any()


def test_a_head_on_a_gpu_is_refused(
    qwen3: Reference, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton.engine.execution import loading

    monkeypatch.setattr(loading, "chosen_device", lambda _: torch.device("cuda"))
    options = EngineOptions(device="cuda", draft_folder=head, draft_kind="eagle3")
    with pytest.raises(ConfigError, match="the EAGLE-3 head in .* runs on a CPU only"):
        loading.build_engine(qwen3.folder, options)
