"""The optimiser: a quadratic brought to its floor, its saved state, updates that are orthogonal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from baton.models.training.optimiser import Optimiser, Rates


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 8)
        self.first = nn.Linear(8, 16, bias=False)
        self.second = nn.Linear(16, 8, bias=False)
        self.norm = nn.RMSNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        out: Tensor = self.norm(self.second(self.first(x)))
        return out


def trained(steps: int, height: float = 1.0, rates: Rates | None = None) -> list[float]:
    torch.manual_seed(1)
    module, target = _Small(), torch.randn(5, 8)
    optimiser = Optimiser(module, rates or Rates())
    losses = []
    for _ in range(steps):
        loss = (module(torch.arange(5)) - target).square().mean()
        losses.append(float(loss.detach()))
        torch.autograd.backward(loss)
        optimiser.step(height)
    return losses


def test_the_loss_falls() -> None:
    losses = trained(200)
    assert losses[-1] < 0.1 * losses[0]


def test_updates_of_matrices_are_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    module = _Small()
    before = module.first.weight.detach().clone()
    torch.autograd.backward(module(torch.arange(5)).square().mean())
    Optimiser(module, Rates(matrix=1.0, decay=0.0)).step(1.0)
    values = torch.linalg.svdvals(module.first.weight.detach() - before)
    # a gradient of five examples has rank five; all its directions count about alike
    scale = 2**0.5  # for a matrix with twice as many rows as columns
    assert float(values.max()) < 1.3 * scale
    assert int((values > 0.5 * scale).sum()) >= 4


def test_embeddings_and_norms_move_by_their_own_rate() -> None:
    torch.manual_seed(0)
    module = _Small()
    before = module.embed_tokens.weight.detach().clone()
    torch.autograd.backward(module(torch.arange(5)).square().mean())
    Optimiser(module, Rates(other=0.01)).step(0.5)
    moved = (module.embed_tokens.weight.detach() - before).abs()
    assert moved.max().item() == pytest.approx(0.005, rel=1e-3)  # Adam's first step is the rate


def test_no_height_no_change() -> None:
    losses = trained(3, height=0.0)
    assert losses[0] == losses[1] == losses[2]


def test_gradients_are_forgotten_after_a_step() -> None:
    module = _Small()
    optimiser = Optimiser(module, Rates())
    torch.autograd.backward(module(torch.arange(5)).sum())
    optimiser.step(1.0)
    assert all(weight.grad is None for weight in module.parameters())


def test_state_goes_on_where_it_was() -> None:
    def step(module: nn.Module, optimiser: Optimiser) -> None:
        torch.autograd.backward(module(torch.arange(5)).square().mean())
        optimiser.step(1.0)

    torch.manual_seed(2)
    one = _Small()
    optimiser = Optimiser(one, Rates())
    for _ in range(3):
        step(one, optimiser)
    other = _Small()
    other.load_state_dict(one.state_dict())
    continued = Optimiser(other, Rates())
    continued.load({name: tensor.clone() for name, tensor in optimiser.state().items()})
    for _ in range(2):
        step(one, optimiser)
        step(other, continued)
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name
    with pytest.raises(KeyError):
        continued.load({"step": torch.tensor(1)})
