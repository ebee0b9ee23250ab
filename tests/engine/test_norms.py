"""The norms in torch, against the formula."""

import pytest
import torch

from baton.engine.model.norms import TorchNorms


def formula(x, weight, eps):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(
    ("kind", "of_weight", "allowed"),
    [
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.bfloat16, torch.float32, 1e-2),
    ],
)
def test_norm_and_norm_of_a_sum(kind, of_weight, allowed):
    torch.manual_seed(0)
    x, residual = torch.randn(2, 5, 48).to(kind)
    weight = torch.randn(48).to(of_weight)
    norms = TorchNorms()
    out = norms.norm(x, weight, 1e-5)
    assert out.dtype == kind
    torch.testing.assert_close(out.double(), formula(x, weight, 1e-5), rtol=allowed, atol=allowed)
    out, total = norms.add_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual) and torch.equal(out, norms.norm(total, weight, 1e-5))
