"""The training of one model, step by step, within a time or a number of steps.

Rates stay high for most of the time and then fall to zero: warm-up, stable, decay. The clock is
the caller's. A run can be saved after any step and continued: parameters and moments as
safetensors, the rest as JSON. Owns the model's parameters while it runs.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as functional
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.models.training.batches import Batch, Batches
from baton.models.training.optimiser import Optimiser, Rates
from baton.models.training.training_model import TrainingModel
from baton.runtime.errors import ConfigError

_WARM_UP_STEPS = 20
_DECAY_FROM = 0.55  # of the time
_TEACHER_SHARE = 0.5  # of a student's loss
_SMOOTHED = 0.95
_STATE = "state.safetensors"


@dataclass(slots=True)
class Progress:
    """Where a run is. `losses` has a mean of each stretch of steps, `by_task` running means."""

    step: int = 0
    elapsed_s: float = 0.0
    tokens: int = 0
    losses: list[tuple[float, float]] = field(default_factory=list)  # minute, loss
    by_task: dict[str, float] = field(default_factory=dict)


class TrainingRun:
    """Trains `model` on `batches`; `teacher`, if any, gives soft targets."""

    def __init__(
        self,
        model: TrainingModel,
        batches: Batches,
        rates: Rates,
        teacher: TrainingModel | None = None,
        *,
        half: bool = True,
        compiled: bool = False,
    ) -> None:
        """`half`: forward and backward products in bfloat16; `compiled`: the model's passes are
        built for each shape of batch, half a minute each, and take two thirds of the time."""
        self.model = model
        self._forward = torch.compile(model, dynamic=False) if compiled else model
        self.progress = Progress()
        self._batches = batches
        self._teacher = teacher
        self._half = half
        self._optimiser = Optimiser(model, rates)

    def step(self, done: float) -> float:
        """One step at the share `done` of the whole; returns the loss per counted token."""
        batch = self._batches.batch(self.progress.step, done)
        with self._autocast():
            hidden = self._forward(batch.tokens)
            logits = self.model.logits(hidden[batch.rows, batch.columns])
        logits = logits.float()
        losses = functional.cross_entropy(logits, batch.targets, reduction="none")
        loss = losses.mean()
        whole = loss
        if self._teacher is not None:
            soft = self._distance(logits, batch)
            whole = (1 - _TEACHER_SHARE) * loss + _TEACHER_SHARE * soft
        torch.autograd.backward(whole)
        self._optimiser.step(height(self.progress.step, done))
        self.progress.step += 1
        self.progress.tokens += batch.read
        self._note(losses.detach(), batch.tasks)
        return float(loss.detach())

    def save(self, folder: Path) -> None:
        """Into `folder`, which then holds this state whole, or the one before."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": w for name, w in self.model.state_dict().items()}
        tensors |= {f"moment.{name}": m for name, m in self._optimiser.state().items()}
        draft = folder / "state.draft"
        described = {"progress": json.dumps(asdict(self.progress))}
        save_file(tensors, draft, metadata=described)
        os.replace(draft, folder / _STATE)

    def load(self, folder: Path) -> bool:
        """Continue from what was saved there; False if nothing was. Raises ConfigError if it
        is of another model."""
        path = folder / _STATE
        if not path.is_file():
            return False
        tensors = load_file(path)
        try:
            self.model.load_state_dict(_under(tensors, "model."))
            self._optimiser.load(_under(tensors, "moment."))
        except (KeyError, RuntimeError) as error:
            raise ConfigError(
                f"{path} is of another model ({error}): give another --folder, or remove it"
            ) from error
        self.progress = read_progress(folder)
        return True

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._half)

    def _distance(self, logits: Tensor, batch: Batch) -> Tensor:
        """Kullback-Leibler distance from the teacher, per counted token (Hinton et al. 2015,
        arXiv:1503.02531)."""
        assert self._teacher is not None
        with torch.no_grad(), self._autocast():
            hidden = self._teacher(batch.tokens)[batch.rows, batch.columns]
            wanted = self._teacher.logits(hidden).float().log_softmax(-1)
        found = logits.log_softmax(-1)
        return functional.kl_div(found, wanted, reduction="batchmean", log_target=True)

    def _note(self, losses: Tensor, tasks: tuple[str, ...]) -> None:
        found: dict[str, list[float]] = defaultdict(list)
        for task, loss in zip(tasks, losses.tolist(), strict=True):
            found[task].append(loss)
        kept = self.progress.by_task
        for task, each in found.items():
            mean = sum(each) / len(each)
            kept[task] = _SMOOTHED * kept.get(task, mean) + (1 - _SMOOTHED) * mean


def height(step: int, done: float) -> float:
    """Return the height that scales the learning rates, 0 to 1."""
    warm = min(1.0, (step + 1) / _WARM_UP_STEPS)
    return warm * min(1.0, max(0.0, (1.0 - done) / (1.0 - _DECAY_FROM)))


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def read_progress(folder: Path) -> Progress:
    """Read the progress of the run saved in `folder`. Raises ConfigError if none was."""
    path = folder / _STATE
    if not path.is_file():
        raise ConfigError(f"{path} is missing: train the model with `make models`")
    with safe_open(path, "pt") as file:
        content = json.loads(file.metadata()["progress"])
    content["losses"] = [(minute, loss) for minute, loss in content["losses"]]
    return Progress(**content)
