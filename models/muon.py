"""The optimiser: Muon for matrices, AdamW for the embedding and the norms.

Muon (Jordan et al. 2024) makes a matrix's momentum nearly orthogonal before it is applied, by
a few Newton-Schulz steps; AdamW is Loshchilov and Hutter 2019, arXiv:1711.05101. Matrices of
one shape are treated together. Owns the moments; `state` and `load` are plain tensors.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_MOMENTUM = 0.95
_BETAS = (0.9, 0.95)
_EPS = 1e-10


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates at full height; `decay` is of the weights of matrices."""

    matrix: float = 0.01
    other: float = 0.002
    decay: float = 0.01


class Muon:
    """Updates the parameters of one module in place."""

    def __init__(self, module: nn.Module, rates: Rates, *, half: bool = False) -> None:
        """`half`: matrices are made orthogonal in bfloat16, which is enough for it."""
        self._rates = rates
        self._half = half
        self._step = 0
        self._parameters = dict(module.named_parameters())
        self._groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        self._others: list[str] = []
        for name, weight in self._parameters.items():
            if weight.dim() == 2 and "embed" not in name:
                self._groups[tuple(weight.shape)].append(name)
            else:
                self._others.append(name)
        self._first = {name: torch.zeros_like(w) for name, w in self._parameters.items()}
        self._second = {name: torch.zeros_like(self._parameters[name]) for name in self._others}

    @torch.no_grad()
    def step(self, height: float) -> None:
        """Apply the gradients and forget them; `height` scales the rates, 0 to 1."""
        self._step += 1
        for shape, names in self._groups.items():
            self._matrices(shape, names, height)
        for name in self._others:
            self._adam(name, height)
        for weight in self._parameters.values():
            weight.grad = None

    def state(self) -> dict[str, Tensor]:
        """Everything that a later `load` needs."""
        found = {f"first.{name}": moment for name, moment in self._first.items()}
        found |= {f"second.{name}": moment for name, moment in self._second.items()}
        return {**found, "step": torch.tensor(self._step)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave. Raises KeyError if a moment is missing."""
        self._step = int(state["step"])
        for name, moment in self._first.items():
            moment.copy_(state[f"first.{name}"])
        for name, moment in self._second.items():
            moment.copy_(state[f"second.{name}"])

    def _matrices(self, shape: tuple[int, ...], names: list[str], height: float) -> None:
        moments = []
        for name in names:
            grad = self._gradient(name)
            moment = self._first[name].lerp_(grad, 1 - _MOMENTUM)
            moments.append(grad.lerp(moment, _MOMENTUM))
        stacked = torch.stack(moments)  # [matrices, rows, columns]
        turned = orthogonal(stacked.bfloat16() if self._half else stacked).to(stacked.dtype)
        rate = self._rates.matrix * height
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        for name, update in zip(names, turned, strict=True):
            weight = self._parameters[name]
            weight.mul_(1 - rate * self._rates.decay).add_(update, alpha=-rate * scale)

    def _adam(self, name: str, height: float) -> None:
        grad, first, second = self._gradient(name), self._first[name], self._second[name]
        first.lerp_(grad, 1 - _BETAS[0])
        second.lerp_(grad.square(), 1 - _BETAS[1])
        mean = first / (1 - _BETAS[0] ** self._step)
        spread = (second / (1 - _BETAS[1] ** self._step)).sqrt_().add_(_EPS)
        self._parameters[name].add_(mean.div_(spread), alpha=-self._rates.other * height)

    def _gradient(self, name: str) -> Tensor:
        grad = self._parameters[name].grad
        assert grad is not None, name
        return grad


def orthogonal(matrices: Tensor) -> Tensor:
    """Near-orthogonal matrices of the same row and column spaces, [matrices, rows, columns]."""
    a, b, c = _QUINTIC
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    turned: Tensor = x.mT if tall else x
    return turned
