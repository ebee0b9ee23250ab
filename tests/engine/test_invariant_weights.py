"""Which matrices of a model on a device are multiplied row by row alike, and which are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from baton.engine.deterministic.batch_invariant_weights import with_invariant_products
from baton.engine.model.linear import JoinedMatrix, PlainMatrix
from baton.engine.model.quantized_weight import quantize_int8
from baton.engine.triton.linear import FixedTileLinear
from baton.engine.triton.matrices import StackedExperts
from baton.engine.triton.quantized import TritonQuantized
from baton.runtime.errors import ModelError
from tests.support.json_values import JsonObject

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Model:
    norm: torch.Tensor
    layers: tuple[Any, ...]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        "quantized int8",
        "quantized int4 by groups of 32",
        "quantized int4 by groups of 16",
        "quantized fp8",
        "quantized, the ordinary product is noticed",
        "experts",
    ],
)
def test_parity(product_checks: dict[str, JsonObject], name: str) -> None:
    assert product_checks[name]["good"], product_checks[name]["said"]


def test_every_kind_is_found_however_deep_and_keeps_its_numbers() -> None:
    weight, bias = torch.randn(4, 16), torch.randn(4)
    quantized = TritonQuantized(quantize_int8(weight), None, CPU)
    stacked = StackedExperts(torch.randn(2, 8, 4), torch.randn(2, 4, 4))
    joined = JoinedMatrix([quantized, PlainMatrix(weight)])
    model = Model(bias, (Model(weight, (PlainMatrix(weight, bias), joined)), None, stacked))
    found = with_invariant_products(model)
    assert found.norm is bias and found.layers[0].norm is weight and found.layers[1] is None
    plain, parts = found.layers[0].layers
    assert isinstance(plain, FixedTileLinear) and plain.weight is weight and plain.bias is bias
    assert isinstance(parts.parts[0], TritonQuantized) and isinstance(
        parts.parts[1], FixedTileLinear
    )
    assert parts.parts[0].fixed and not quantized.fixed
    assert parts.parts[0].values is quantized.values
    assert found.layers[2].tile_rows == 64 and found.layers[2].down is stacked.down


def test_a_product_without_an_invariant_form_is_refused_by_name() -> None:
    with pytest.raises(
        ModelError, match=r"worker\.deterministic: function has no batch-invariant product"
    ):
        with_invariant_products(Model(torch.zeros(1), (lambda x: x,)))
