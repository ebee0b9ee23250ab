"""Sizes of weights from a spec alone, against what the reader of weights holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from baton.engine.checkpoint.weights import load_weights
from baton.engine.model.experts import ListedExperts
from baton.engine.model.linear import Linear, PlainMatrix
from baton.engine.model.matrix_backend import ExpertSource
from baton.engine.model.quantized_weight import QuantizedWeight
from baton.engine.spec.model_spec import read_spec
from baton.engine.spec.quantization_config import LoadQuantization
from baton.engine.spec.rank_split import RankSplit, spec_of_rank
from baton.engine.spec.weight_sizes import weight_sizes
from tests.support.published_models import PUBLISHED, write_config
from tests.support.small_models import MODELS, REPRESENTATIVES, make_model


class KeptMatrices:
    """A `MatrixBackend` that keeps what it is handed."""

    device = None

    def plain(self, weight: Tensor, bias: Tensor | None = None) -> PlainMatrix:
        return PlainMatrix(weight, bias)

    def quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        return cast(Linear, (weight, bias))

    def experts(self, source: ExpertSource) -> ListedExperts:
        return source.listed()


def tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))
    elif hasattr(value, "__dict__"):
        yield from tensors(list(vars(value).values()))
    elif hasattr(type(value), "__slots__"):
        names = type(value).__slots__  # type: ignore[attr-defined] # of this branch
        yield from tensors([getattr(value, name) for name in names])


def held_bytes(value: object) -> int:
    found = {tensor.data_ptr(): tensor.nbytes for tensor in tensors(value)}
    return sum(found.values())


@pytest.fixture(scope="module", params=sorted(REPRESENTATIVES | {"qwen2", "phi3", "qwen3-moe"}))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_model(request.param, path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_are_those_of_the_tensors_held(folder: Path, dtype: torch.dtype) -> None:
    spec = read_spec(folder)
    weights = load_weights(folder, spec, dtype, KeptMatrices())
    assert weight_sizes(spec, dtype.itemsize).bytes == held_bytes(weights)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_sizes_are_those_held(folder: Path, quantization: LoadQuantization) -> None:
    spec = read_spec(folder)
    columns = [spec.hidden_size, spec.ffn_size, spec.heads * spec.head_dim]
    if quantization == "int4" and (spec.latent or spec.experts or any(c % 32 for c in columns)):
        pytest.skip("some columns have no group for int4")
    weights = load_weights(folder, spec, torch.bfloat16, KeptMatrices(), quantization=quantization)
    assert weight_sizes(spec, 2, quantization).bytes == held_bytes(weights)


def test_sizes_of_ranks_add_up_to_the_whole(folder: Path) -> None:
    spec = read_spec(folder)
    if spec.kv_heads < 2 or spec.latent:
        pytest.skip("ranks share a KV head, or all hold the latent's matrices")
    parts = [
        load_weights(folder, spec, torch.bfloat16, KeptMatrices(), split=RankSplit(2, rank))
        for rank in range(2)
    ]
    for rank, part in enumerate(parts):
        own = spec_of_rank(spec, RankSplit(2, rank))
        assert weight_sizes(own, 2).bytes == held_bytes(part)


def test_a_rank_holds_its_group_of_experts(tmp_path: Path) -> None:
    make_model("qwen3-moe", tmp_path)
    spec, split = read_spec(tmp_path), RankSplit(2, 1, ep=2)
    weights = load_weights(tmp_path, spec, torch.bfloat16, KeptMatrices(), split=split)
    assert weight_sizes(spec_of_rank(spec, split), 2).bytes == held_bytes(weights)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str, tmp_path: Path) -> None:
    """To the published precision: the active ones without the embedding, which is looked up."""
    published = PUBLISHED[name]
    folder = write_config(name, tmp_path)
    assert json.loads((folder / "config.json").read_text())["architectures"]
    sizes = weight_sizes(read_spec(folder), 2)
    assert sizes.parameters == pytest.approx(published.parameters, rel=0.01)
    assert sizes.active_parameters == pytest.approx(published.active, rel=0.06)


def test_every_family_has_sizes(tmp_path: Path) -> None:
    for name in MODELS:
        make_model(name, tmp_path / name)
        sizes = weight_sizes(read_spec(tmp_path / name), 2)
        assert 0 < sizes.active_parameters <= sizes.parameters
        assert 0 < sizes.read_bytes(1) <= sizes.read_bytes(64) <= sizes.bytes
        assert sizes.pair_flops > 0


def test_a_step_reads_the_experts_that_its_tokens_choose(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 8 of 128 experts a token; one token reads about its active parameters."""
    sizes = weight_sizes(read_spec(write_config("Qwen/Qwen3-30B-A3B", tmp_path)), 2)
    assert sizes.read_bytes(1) == pytest.approx(2 * sizes.active_parameters, rel=0.01)
    all_but_table = sizes.bytes - sizes.table_bytes
    assert sizes.read_bytes(2) < 2 * sizes.read_bytes(1)
    assert sizes.read_bytes(256) == pytest.approx(all_but_table, rel=1e-4)


def test_a_dense_step_reads_all_but_an_untied_embedding(tmp_path: Path) -> None:
    sizes = weight_sizes(read_spec(write_config("meta-llama/Llama-3.1-8B", tmp_path)), 2)
    table = 128256 * 4096 * 2
    assert sizes.read_bytes(1) == sizes.read_bytes(99) == sizes.bytes - table
