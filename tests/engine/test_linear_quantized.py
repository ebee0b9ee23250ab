from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import baton.engine.cpu.linear_quantized as linear_quantized
from baton.engine.cpu.linear_quantized import CompiledFp8, Int4Tiles, QuantizedMatrix
from baton.engine.model.linear import JoinedMatrix
from baton.engine.model.quantized_weight import QuantizedWeight, quantize_int4, quantize_int8

ROWS = [1, 5, 100]  # few and many, for every form


def fp8(weight, group):
    blocks = weight.split(group, dim=1)
    scales = torch.cat([block.abs().amax(1, keepdim=True) / 448 for block in blocks], dim=1)
    spread = scales.repeat_interleave(group, 1)[:, : weight.shape[1]]
    return QuantizedWeight("fp8", (weight / spread).to(torch.float8_e4m3fn), scales, group)


def grouped_int8(weight):
    whole = quantize_int8(weight.view(-1, 32))
    codes, scales = whole.codes.view(weight.shape), whole.scales.view(weight.shape[0], -1)
    return QuantizedWeight("int8", codes, scales, 32, torch.full(scales.shape, 3).short())


FORMS = {
    "int8": quantize_int8,
    "int8-groups": grouped_int8,
    "int4-128": lambda weight: quantize_int4(weight, 128),
    "int4-32": lambda weight: quantize_int4(weight, 32),
    "int4-whole-rows": lambda weight: quantize_int4(weight, 384),
    "int4-groups-of-48": lambda weight: quantize_int4(weight, 48),
    "fp8": lambda weight: fp8(weight, 384),
    "fp8-cut-block": lambda weight: fp8(weight, 256),
}


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With torch's kernels and ours, and as where both are missing."""
    if request.param == "plain":
        monkeypatch.setattr(linear_quantized, "int4_tile_rows", lambda: None)
    return request.param


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("out", [64, 1100])
def test_the_product_is_that_of_the_values(way: str, name: str, out: int) -> None:
    torch.manual_seed(out)
    weight = FORMS[name](torch.randn(out, 384))
    bias = torch.randn(out).to(torch.bfloat16)
    product = QuantizedMatrix(weight, bias, compiled=way == "compiled")
    for rows in ROWS:
        x = torch.randn(rows, 384).to(torch.bfloat16)
        found = product(x)
        wanted = x.float() @ weight.dequantized().T + bias.float()
        assert found.dtype == torch.bfloat16
        assert found.is_contiguous()
        assert found.shape == (rows, out)
        assert (found.float() - wanted).norm() < 0.0035 * wanted.norm()


def test_scales_of_a_file_are_not_rounded() -> None:
    """A rounded one is off in all of its row's results alike, which their own rounding is not."""
    torch.manual_seed(5)
    ours = quantize_int8(torch.randn(64, 384))
    file = replace(ours, scales=ours.scales * (1 + torch.rand(64, 1)))
    rounded = replace(file, scales=file.scales.bfloat16().float())
    for rows in (32, 100):
        x = torch.randn(rows, 384).to(torch.bfloat16)
        wanted = x.float() @ file.dequantized().T
        for weight, exact in ((file, True), (rounded, False)):
            ratio = (QuantizedMatrix(weight)(x) * wanted).sum(0) / wanted.square().sum(0)
            assert ((ratio - 1).abs().max().item() < 0.0025) is exact


@pytest.mark.parametrize("name", FORMS)
def test_float32_is_as_exact_as_its_values(name: str) -> None:
    torch.manual_seed(1)
    weight = FORMS[name](torch.randn(70, 384))
    x = torch.randn(3, 384)
    found = QuantizedMatrix(weight, None, torch.float32)(x)
    torch.testing.assert_close(found, x @ weight.dequantized().T, rtol=1e-4, atol=1e-4)


def test_every_fp8_code_is_unpacked_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    weight = QuantizedWeight(
        "fp8", codes.view(torch.float8_e4m3fn).view(4, 64), torch.full((4, 1), 0.5), 64
    )
    product = QuantizedMatrix(weight)
    assert isinstance(product.kernel, CompiledFp8)
    found = product(torch.eye(64, dtype=torch.bfloat16))
    assert torch.equal(found, weight.dequantized(torch.bfloat16).T)


def test_every_int4_code_is_unpacked_by_both_ways() -> None:
    torch.manual_seed(2)
    weight = quantize_int4(torch.randn(192, 64), 32)
    product = QuantizedMatrix(weight)
    assert isinstance(product.kernel, Int4Tiles)
    values = weight.dequantized(torch.bfloat16)
    many = product(torch.eye(64).bfloat16().repeat(2, 1))
    torch.testing.assert_close(many, values.T.repeat(2, 1), rtol=0.01, atol=0.02)
    few = torch.cat([product(row) for row in torch.eye(64).bfloat16().split(8)])
    torch.testing.assert_close(few, values.T, rtol=0.01, atol=0.02)


def test_permuted_columns_take_permuted_inputs(way: str) -> None:
    torch.manual_seed(3)
    whole = quantize_int4(torch.randn(64, 64), 32)
    order = torch.randperm(64)
    weight = QuantizedWeight("int4", whole.codes, whole.scales, 32, whole.zeros, order)
    x = torch.randn(4, 64).to(torch.bfloat16)
    wanted = x.float() @ weight.dequantized().T
    product = QuantizedMatrix(weight, compiled=way == "compiled")
    assert (product(x).float() - wanted).norm() < 0.005 * wanted.norm()


def test_an_input_that_is_not_contiguous() -> None:
    weight = quantize_int8(torch.randn(64, 64))
    wide = torch.randn(4, 128).to(torch.bfloat16)
    product = QuantizedMatrix(weight)
    assert torch.equal(product(wide[:, ::2]), product(wide[:, ::2].contiguous()))


def test_joined_matrices_lie_one_below_the_other() -> None:
    one, other = torch.randn(3, 8), torch.randn(5, 8)
    x = torch.randn(2, 8)
    found = JoinedMatrix([lambda x: x @ one.T, lambda x: x @ other.T])(x)
    torch.testing.assert_close(found, x @ torch.cat((one, other)).T)


def test_a_packed_order_of_another_kind_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Operators:
        _weight_int4pack_mm_for_cpu = None

        @staticmethod
        def _convert_weight_to_int4pack_for_cpu(codes, tiles):
            return codes[:, ::2].to(torch.uint8)

    monkeypatch.setattr(torch.ops, "aten", Operators)
    assert linear_quantized.int4_tile_rows.__wrapped__() is None
