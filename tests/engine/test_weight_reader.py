from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.checkpoint.shards import Shards
from baton.engine.checkpoint.weight_reader import WeightReader
from baton.engine.cpu.linear import CpuMatrices
from baton.runtime.errors import ModelError

STORED = {
    "a.weight": torch.randn(3, 8),
    "b.weight": torch.randn(5, 8).to(torch.float16),
    "a.bias": torch.randn(3),
    "b.bias": torch.randn(5),
}


@pytest.fixture
def reader(tmp_path: Path) -> WeightReader:
    save_file(STORED, tmp_path / "model.safetensors")
    return WeightReader(Shards(tmp_path), torch.float32, CpuMatrices())


def test_a_fused_matrix_multiplies_as_its_parts(reader: WeightReader) -> None:
    x = torch.randn(4, 8)
    found = reader.matrix([("a", 3), ("b", 5)], 8, bias=True)(x)
    parts = [x @ STORED[f"{n}.weight"].float().T + STORED[f"{n}.bias"] for n in "ab"]
    torch.testing.assert_close(found, torch.cat(parts, dim=1))


def test_dense_joins_from_top_to_bottom(reader: WeightReader) -> None:
    joined = reader.dense([("b", 5), ("a", 3)], 8)
    assert torch.equal(joined[:5], STORED["b.weight"].float())
    assert torch.equal(joined[5:], STORED["a.weight"])


def test_vector_and_table_are_named_by_the_tensor(reader: WeightReader) -> None:
    assert torch.equal(reader.vector("a.bias", 3), STORED["a.bias"])
    assert torch.equal(reader.table("a.weight", 3, 8), STORED["a.weight"])


def test_a_missing_bias_is_named(reader: WeightReader) -> None:
    with pytest.raises(ModelError, match=r"tensor c\.bias is in none"):
        reader.matrix([("c", 3)], 8, bias=True)


@pytest.mark.parametrize("parts", [[("a", 4)], [("b", 5), ("a", 2)]])
def test_rows_that_differ_from_the_file_are_refused(
    reader: WeightReader, parts: list[tuple[str, int]]
) -> None:
    with pytest.raises(ModelError, match=r"a\.weight has shape \[3, 8\].*asks for \[\d, 8\]"):
        reader.matrix(parts, 8)
