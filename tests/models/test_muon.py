"""The optimiser: orthogonal updates, a quadratic brought to its floor, and its saved state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from baton.models.muon import Muon, Rates, orthogonal


@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)])
def test_updates_are_nearly_orthogonal(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    given = torch.randn(3, *shape) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    values = torch.linalg.svdvals(orthogonal(given))
    # all directions count about alike, whatever their size was; the steps are not exact
    assert float(values.max()) < 1.3
    assert float((values > 0.5).float().mean()) > 0.85


def test_orthogonal_keeps_directions_and_does_not_mix_matrices() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(16, 32), torch.randn(16, 32)
    both = orthogonal(torch.stack([one, other]))
    assert torch.allclose(both[0], orthogonal(one[None])[0], atol=1e-5)
    assert float((both[0] * one).sum()) > 0


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 8)
        self.first = nn.Linear(8, 16, bias=False)
        self.second = nn.Linear(16, 8, bias=False)
        self.norm = nn.RMSNorm(8)

    def forward(self, places: Tensor) -> Tensor:
        x = self.embed_tokens(places)
        out: Tensor = self.norm(self.second(self.first(x)))
        return out


def trained(steps: int, height: float = 1.0, rates: Rates | None = None) -> list[float]:
    torch.manual_seed(1)
    module, target = _Small(), torch.randn(5, 8)
    optimiser = Muon(module, rates or Rates())
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


def test_no_height_no_change() -> None:
    losses = trained(3, height=0.0)
    assert losses[0] == losses[1] == losses[2]


def test_gradients_are_forgotten_after_a_step() -> None:
    module = _Small()
    optimiser = Muon(module, Rates())
    torch.autograd.backward(module(torch.arange(5)).sum())
    optimiser.step(1.0)
    assert all(weight.grad is None for weight in module.parameters())


def test_state_goes_on_where_it_was() -> None:
    def step(module: nn.Module, optimiser: Muon) -> None:
        torch.autograd.backward(module(torch.arange(5)).square().mean())
        optimiser.step(1.0)

    torch.manual_seed(2)
    one = _Small()
    optimiser = Muon(one, Rates())
    for _ in range(3):
        step(one, optimiser)
    other = _Small()
    other.load_state_dict(one.state_dict())
    continued = Muon(other, Rates())
    continued.load({name: tensor.clone() for name, tensor in optimiser.state().items()})
    for _ in range(2):
        step(one, optimiser)
        step(other, continued)
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name
    with pytest.raises(KeyError):
        continued.load({"step": torch.tensor(1)})
