"""Optimise a model: Muon for matrices, AdamW for the embedding and the norms.

Both are torch's. Muon (Jordan et al. 2024) makes a matrix's momentum nearly orthogonal before it
is applied; AdamW is Loshchilov and Hutter 2019, arXiv:1711.05101. Owns the moments; `state` and
`load` exchange them as plain tensors, by the name of the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_BETAS = (0.9, 0.95)
_EPS = 1e-10
_MUON_MOMENTS = ("momentum_buffer",)
_ADAM_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates at full height; `decay` is of the weights of matrices."""

    matrix: float = 0.01
    other: float = 0.002
    decay: float = 0.01


class Optimiser:
    """Updates the parameters of one module in place."""

    def __init__(self, module: nn.Module, rates: Rates) -> None:
        self._rates = rates
        self._parameters = dict(module.named_parameters())
        matrices = [w for n, w in self._parameters.items() if w.dim() == 2 and "embed" not in n]
        self._matrices = set(matrices)
        others = [w for w in self._parameters.values() if w not in self._matrices]
        self._muon = torch.optim.Muon(
            matrices, lr=rates.matrix, weight_decay=rates.decay, momentum=_MOMENTUM
        )
        self._adam = torch.optim.AdamW(
            others, lr=rates.other, betas=_BETAS, eps=_EPS, weight_decay=0.0
        )

    def step(self, height: float) -> None:
        """Apply the gradients and drop them; `height` scales the rates, 0 to 1."""
        rates: dict[torch.optim.Optimizer, float] = {
            self._muon: self._rates.matrix,
            self._adam: self._rates.other,
        }
        for optimiser, rate in rates.items():
            for group in optimiser.param_groups:
                group["lr"] = rate * height
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return all moments by name, for a later `load`; none before the first step."""
        return {
            f"{moment}.{name}": value
            for name, weight in self._parameters.items()
            for moment, value in self._optimiser_of(weight).state[weight].items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from what `state` returned. Raises KeyError if a moment is missing."""
        if not state:
            return
        for name, weight in self._parameters.items():
            optimiser = self._optimiser_of(weight)
            moments = _MUON_MOMENTS if optimiser is self._muon else _ADAM_MOMENTS
            optimiser.state[weight] = {
                moment: state[f"{moment}.{name}"].clone() for moment in moments
            }

    def _optimiser_of(self, weight: Tensor) -> torch.optim.Optimizer:
        return self._muon if weight in self._matrices else self._adam
