"""Trains baton-tiny and its draft from nothing, on the CPU, within a time.

    python -m baton.models.train [--minutes N] [--folder FOLDER] [--threads N] [--seed N]

The tokenizer first, then baton-tiny, then the draft, which also learns from baton-tiny's own
distributions. What is done is kept in FOLDER/state: a run that was ended goes on from there.
Writes FOLDER/baton-tiny, FOLDER/baton-tiny-draft and FOLDER/loss.png. The schedule follows the
clock, so a faster machine makes more steps in the same time; --steps counts steps instead, and
then a seed gives the same model on the same machine. Where g++ is found, the passes are
compiled for it.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from baton.models import tiny_folder, tiny_tokenizer
from baton.models.loss_curve import write_curve
from baton.models.muon import Rates
from baton.models.training_batches import Batches
from baton.models.training_model import TrainingModel
from baton.models.training_run import TrainingRun

_NAMES = ("baton-tiny", "baton-tiny-draft")
_SHARES = {"baton-tiny": 0.82, "baton-tiny-draft": 0.18}  # of the time
_SAVE_EVERY_S = 120.0
_POINT_STEPS = 20  # steps that one point of the loss curve is the mean of


@dataclass(frozen=True, slots=True)
class Options:
    """`minutes` for both models; `steps` of each model instead, if not 0. `batch_tokens` are
    computed in a step, `half`: products in bfloat16, `compiled`: passes compiled, which takes
    a C++ compiler."""

    folder: Path
    minutes: float = 85.0
    steps: int = 0
    batch_tokens: int = 3072
    threads: int = 0
    seed: int = 0
    half: bool = True
    compiled: bool = False


def train(options: Options, note: Callable[[str, float, float], None]) -> None:
    """Train both models; `note` hears the model's name, the share done and the loss. Raises
    ConfigError if the state in the folder is of other models."""
    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = _tokenizer(options.folder)
    teacher: TrainingModel | None = None
    curves = {}
    for name in _NAMES:
        shape = tiny_folder.shape_of(name, tokenizer.get_vocab_size())
        encoder = tiny_tokenizer.ChatEncoder(tokenizer)
        batches = Batches(encoder, options.batch_tokens, options.seed)
        model = TrainingModel(shape, options.seed)
        torch.compiler.reset()  # it keeps a few shapes only, and each model has as many
        run = TrainingRun(
            model, batches, Rates(), teacher, half=options.half, compiled=options.compiled
        )
        _train_one(name, run, options, note)
        tiny_folder.write_model(options.folder / name, model, tokenizer)
        teacher = model
        curves[name] = run.progress.losses
        write_curve(options.folder / "loss.png", curves)


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "state" / "tokenizer.json"
    if path.is_file():
        return Tokenizer.from_file(str(path))
    tokenizer = tiny_tokenizer.train()
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def _train_one(
    name: str, run: TrainingRun, options: Options, note: Callable[[str, float, float], None]
) -> None:
    """From what is saved, to the end of the model's share of the time; saves now and then."""
    folder = options.folder / "state" / name
    run.load(folder)
    budget_s = options.minutes * 60 * _SHARES[name]
    progress = run.progress
    saved_s = progress.elapsed_s
    last: list[float] = []
    while (done := _done(run, options, budget_s)) < 1.0:
        started = time.monotonic()
        last.append(run.step(done))
        progress.elapsed_s += time.monotonic() - started
        if len(last) == _POINT_STEPS:
            progress.losses.append((progress.elapsed_s / 60, sum(last) / len(last)))
            note(name, done, progress.losses[-1][1])
            last = []
        if progress.elapsed_s - saved_s > _SAVE_EVERY_S:
            run.save(folder)
            saved_s = progress.elapsed_s
    run.save(folder)
    note(name, 1.0, progress.losses[-1][1] if progress.losses else float("nan"))


def _done(run: TrainingRun, options: Options, budget_s: float) -> float:
    if options.steps:
        return run.progress.step / options.steps
    return run.progress.elapsed_s / budget_s


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    columns = (
        TextColumn("{task.description:<17}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        shown = {name: bar.add_task(name, total=1.0, loss=float("nan")) for name in _NAMES}

        def note(name: str, done: float, loss: float) -> None:
            bar.update(shown[name], completed=done, loss=loss)

        train(options, note)
    measure = f"python -m baton.models.evaluate --folder {options.folder}"
    print(f"both models are in {options.folder}; measure them: {measure}")


def _options(arguments: Sequence[str] | None) -> Options:
    made = argparse.ArgumentParser(description="Train baton-tiny and its draft from nothing")
    made.add_argument("--folder", type=Path, default=Path("build/models"))
    made.add_argument("--minutes", type=float, default=85.0)
    made.add_argument("--steps", type=int, default=0, help="of each model, instead of minutes")
    made.add_argument("--batch-tokens", type=int, default=3072)
    made.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--no-half", action="store_true", help="float32 products")
    made.add_argument("--no-compile", action="store_true", help="as if there were no compiler")
    given = made.parse_args(arguments)
    return Options(
        given.folder, given.minutes, given.steps, given.batch_tokens, given.threads, given.seed,
        not given.no_half, not given.no_compile and shutil.which("g++") is not None,
    )  # fmt: skip


if __name__ == "__main__":
    main()
