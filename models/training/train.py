"""Trains baton-tiny and its draft on the CPU, within a time, in two stages.

    python -m baton.models.training.train [--minutes N] [--folder FOLDER] [--from FOLDER]
        [--threads N]

The tokenizer first. Stage one begins from nothing and learns the small world; stage two goes on
from its weights at lower rates and adds what people type first. In each stage baton-tiny comes
first, then the draft, which also learns from baton-tiny's own distributions. --from begins with
stage two, from the models of that folder. What is done is kept in FOLDER/state: a run that was
ended goes on from there.
Writes FOLDER/baton-tiny, FOLDER/baton-tiny-draft and FOLDER/loss.png. The schedule follows the
clock, so a faster machine makes more steps in the same time; --steps counts steps instead, and
then a seed gives the same model on the same machine. Where g++ is found, the passes are
compiled for it.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor

from baton.models.training import tiny_folder, tiny_tokenizer
from baton.models.training.batches import FIRST_MESSAGES, FROM_NOTHING, Batches, Curriculum
from baton.models.training.loss_curve import write_curve
from baton.models.training.optimiser import Rates
from baton.models.training.training_model import TrainingModel
from baton.models.training.training_run import TrainingRun

_NAMES = ("baton-tiny", "baton-tiny-draft")
_SAVE_EVERY_S = 120.0
_POINT_STEPS = 20  # steps that one point of the loss curve is the mean of


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training of both models; `shares` of the whole time, by model. `kept` is the
    weight of the stage's first weights in the mean with its last ones, which brings back what it
    has made the model forget (Wortsman et al. 2022, arXiv:2109.01903)."""

    name: str
    curriculum: Curriculum
    rates: Rates
    shares: Mapping[str, float]
    kept: float = 0.0


STAGES = (
    Stage("one", FROM_NOTHING, Rates(), {"baton-tiny": 0.54, "baton-tiny-draft": 0.12}),
    Stage(
        "two",
        FIRST_MESSAGES,
        Rates(matrix=0.004, other=0.0008),
        {"baton-tiny": 0.27, "baton-tiny-draft": 0.07},
        kept=0.15,
    ),
)


@dataclass(frozen=True, slots=True)
class Options:
    """`minutes` for the whole training; `steps` of each model in each stage instead, if not 0.
    `base` is a folder with both models, from which stage two begins. `batch_tokens` are
    computed in a step, `half`: products in bfloat16, `compiled`: passes compiled, which takes
    a C++ compiler."""

    folder: Path
    minutes: float = 130.0
    steps: int = 0
    batch_tokens: int = 3072
    threads: int = 0
    seed: int = 0
    half: bool = True
    compiled: bool = False
    base: Path | None = None


def train(options: Options, note: Callable[[str, float, float], None]) -> None:
    """Train both models; `note` hears the model's name, the share done and the loss. Raises
    ConfigError if the state in the folder is of other models."""
    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = kept_tokenizer(options)
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in _NAMES}
    models = {
        name: TrainingModel(tiny_folder.shape_of(name, tokenizer.get_vocab_size()), options.seed)
        if options.base is None
        else tiny_folder.read_model(options.base / name)
        for name in _NAMES
    }
    for stage in STAGES if options.base is None else STAGES[1:]:
        teacher: TrainingModel | None = None
        for name, model in models.items():
            encoder = tiny_tokenizer.ChatEncoder(tokenizer)
            batches = Batches(encoder, options.batch_tokens, options.seed, stage.curriculum)
            torch.compiler.reset()  # it keeps a few shapes only, and each model has as many
            run = TrainingRun(
                model, batches, stage.rates, teacher, half=options.half, compiled=options.compiled
            )
            before = {key: weight.clone() for key, weight in model.state_dict().items()}
            _train_one(name, stage, run, options, note)
            keep(model, before, stage.kept)
            tiny_folder.write_model(options.folder / name, model, tokenizer)
            teacher = model
            curves[name] = joined(curves[name], run.progress.losses)
            write_curve(options.folder / "loss.png", {n: c for n, c in curves.items() if c})


@torch.no_grad()
def keep(model: TrainingModel, before: Mapping[str, Tensor], share: float) -> None:
    """Move the model's weights towards `before` by `share` of the way."""
    for key, weight in model.state_dict().items():
        weight.lerp_(before[key], share)


def joined(
    first: list[tuple[float, float]], then: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """One curve of two: the minutes of the second count from the end of the first."""
    passed = first[-1][0] if first else 0.0
    return first + [(passed + minute, loss) for minute, loss in then]


def kept_tokenizer(options: Options) -> Tokenizer:
    """Return the tokenizer of the run (kept, of the base, or trained now) and keep it."""
    path = options.folder / "state" / "tokenizer.json"
    if path.is_file():
        return Tokenizer.from_file(str(path))
    if options.base is None:
        tokenizer = tiny_tokenizer.train()
    else:
        tokenizer = Tokenizer.from_file(str(options.base / _NAMES[0] / "tokenizer.json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def _train_one(
    name: str,
    stage: Stage,
    run: TrainingRun,
    options: Options,
    note: Callable[[str, float, float], None],
) -> None:
    """Train from what is saved to the end of the model's share of the time; save now and then."""
    folder = options.folder / "state" / f"stage-{stage.name}" / name
    run.load(folder)
    budget_s = options.minutes * 60 * stage.shares[name]
    progress = run.progress
    saved_s = progress.elapsed_s
    last: list[float] = []
    while (done := _done(run, options, budget_s)) < 1.0:
        started = time.monotonic()
        last.append(run.step(done))
        progress.elapsed_s += time.monotonic() - started
        if len(last) == _POINT_STEPS:
            progress.losses.append((progress.elapsed_s / 60, sum(last) / len(last)))
            note(f"{name}, {stage.name}", done, progress.losses[-1][1])
            last = []
        if progress.elapsed_s - saved_s > _SAVE_EVERY_S:
            run.save(folder)
            saved_s = progress.elapsed_s
    run.save(folder)
    note(f"{name}, {stage.name}", 1.0, progress.losses[-1][1] if progress.losses else float("nan"))


def _done(run: TrainingRun, options: Options, budget_s: float) -> float:
    if options.steps:
        return run.progress.step / options.steps
    return run.progress.elapsed_s / budget_s


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        shown: dict[str, TaskID] = {}

        def note(name: str, done: float, loss: float) -> None:
            if name not in shown:
                shown[name] = bar.add_task(name, total=1.0, loss=float("nan"))
            bar.update(shown[name], completed=done, loss=loss)

        train(options, note)
    measure = f"python -m baton.models.evaluation.evaluate --folder {options.folder}"
    print(f"both models are in {options.folder}; measure them: {measure}")


def _options(arguments: Sequence[str] | None) -> Options:
    made = argparse.ArgumentParser(description="Train baton-tiny and its draft")
    made.add_argument("--folder", type=Path, default=Path("build/models"))
    made.add_argument("--minutes", type=float, default=130.0, help="of the whole training")
    made.add_argument("--from", dest="base", type=Path, help="both models: begin with stage two")
    made.add_argument("--steps", type=int, default=0, help="of each model, instead of minutes")
    made.add_argument("--batch-tokens", type=int, default=3072)
    made.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--no-half", action="store_true", help="float32 products")
    made.add_argument("--no-compile", action="store_true", help="as if there were no compiler")
    given = made.parse_args(arguments)
    return Options(
        given.folder, given.minutes, given.steps, given.batch_tokens, given.threads, given.seed,
        not given.no_half, not given.no_compile and shutil.which("g++") is not None, given.base,
    )  # fmt: skip


if __name__ == "__main__":
    main()
