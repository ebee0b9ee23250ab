"""The model that is trained is the model that is served: transformers and the engine agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import read_spec
from baton.models.embedded import embedded_model
from baton.models.training import tiny_folder, tiny_tokenizer, training_model
from baton.models.training.training_model import TinyShape, TrainingModel
from baton.runtime.errors import ConfigError

VOCAB = 3712
SMALL = TinyShape(2, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=96, vocab=VOCAB, context=512)
TOKENIZER = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))


def lively(shape: TinyShape) -> TrainingModel:
    """Weights large enough that attention and norms matter, norms that are not all one."""
    model = TrainingModel(shape, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
            else:
                weight.mul_(5)
    return model


@pytest.fixture(scope="module")
def model() -> TrainingModel:
    return lively(SMALL)


@pytest.fixture(scope="module")
def folder(model: TrainingModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write_model(
        tmp_path_factory.mktemp("m") / "made", model, TOKENIZER, torch.float32
    )


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def trained_logits(model: TrainingModel, ids: torch.Tensor) -> torch.Tensor:
    return model.logits(model(ids))[0]


@pytest.mark.parametrize("length", [200, 300])
def test_logits_equal_those_of_transformers(
    model: TrainingModel, folder: Path, length: int
) -> None:
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = tokens(length)
    with torch.no_grad():
        wanted = theirs.eval()(ids).logits[0]
    assert wanted.std() > 0.5
    assert (trained_logits(model, ids) - wanted).abs().max() < 1e-4


def test_logits_equal_those_of_the_engine(model: TrainingModel, folder: Path) -> None:
    runner = build_runner(folder, EngineOptions(blocks=16, block_size=16))
    ids = tokens(200)
    (found,) = runner.all_logits(StepBatch((Slice(ids[0].tolist(), 0, range(13)),)))
    assert (trained_logits(model, ids) - found).abs().max() < 1e-4


def test_what_was_written_is_read_back(model: TrainingModel, folder: Path) -> None:
    back = tiny_folder.read_model(folder)
    assert back.shape == SMALL
    assert torch.equal(trained_logits(back, tokens(20)), trained_logits(model, tokens(20)))
    with pytest.raises(ConfigError, match="make models"):
        tiny_folder.read_model(folder / "nothing")


def test_both_ways_of_attention_have_the_same_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn((2, 4, 64, 32), generator=generator) for _ in range(4)]
    found = []
    for limit in (0, 64):
        parts = [part.clone().requires_grad_() for part in given[:3]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training_model, "_PLAIN_LENGTH", limit)
            mixed = training_model.attend(*parts)
        torch.autograd.backward((mixed * given[3]).sum())
        found.append([mixed, *(part.grad for part in parts)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@torch.no_grad()
def test_padding_and_other_rows_change_nothing(model: TrainingModel) -> None:
    ids = tokens(40)
    alone = model(ids)
    padded = torch.zeros((2, 64), dtype=torch.int64)
    padded[1, :40] = ids[0]
    assert (model(padded)[1, :40] - alone[0]).abs().max() < 1e-5


@pytest.mark.parametrize("name", tiny_folder.MAX_PARAMETERS)
@torch.no_grad()
def test_half_of_the_first_heads_begin_by_looking_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TrainingModel(tiny_folder.shape_of(name, VOCAB))
    attend, length = training_model.attend, 300
    given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def noted(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        given.append((queries[0], keys[0]))
        return attend(queries, keys, values)

    monkeypatch.setattr(training_model, "attend", noted)
    model(tokens(length))
    queries, keys = given[0]  # of the first layer
    aimed = len(queries) // 2
    scores = queries @ keys.mT / model.shape.head_dim**0.5
    shares = (scores + torch.full((length, length), float("-inf")).triu(1)).softmax(-1)
    for head in range(aimed):
        assert shares[head].diagonal(-1 - head)[20:].mean() > 0.8
    assert shares[aimed:, -1].max() < 0.5


def test_the_seed_decides_the_weights() -> None:
    one, same, other = (TrainingModel(SMALL, seed).state_dict() for seed in (1, 1, 2))
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


@pytest.mark.parametrize("name", tiny_folder.MAX_PARAMETERS)
def test_sizes_are_within_what_was_promised(name: str, tmp_path: Path) -> None:
    shape = tiny_folder.shape_of(name, TOKENIZER.get_vocab_size())
    model = TrainingModel(shape)
    assert sum(weight.numel() for weight in model.parameters()) == shape.parameters
    assert shape.parameters <= tiny_folder.MAX_PARAMETERS[name]
    folder = tiny_folder.write_model(tmp_path / name, model, TOKENIZER)
    assert (folder / "model.safetensors").stat().st_size <= tiny_folder.MAX_BYTES
    spec = read_spec(folder)
    assert (spec.family, spec.max_context, spec.tied_embeddings) == ("qwen3", 2048, True)
    assert spec.eos_ids == (tiny_tokenizer.SPECIAL_TOKENS.index("<|end|>"),)
    assert spec.vocab_size >= TOKENIZER.get_vocab_size()
    loaded: Any = AutoTokenizer.from_pretrained(folder)
    assert loaded.model_max_length == 2048
