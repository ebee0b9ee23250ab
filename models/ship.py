"""Puts the trained models into the package, if their evaluation reached every limit.

    python -m baton.models.ship [--folder FOLDER] [--into FOLDER]

Copies what `baton.models.training.train` and `baton.models.evaluation.evaluate` (with `--card
--json FOLDER/evaluation.json`) left in FOLDER. The curve of the loss goes beside the weights of
baton-tiny. Existing files are replaced only when everything to be copied was found.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from baton.models.embedded import EMBEDDED, EMBEDDED_DRAFT
from baton.models.evaluation.scoring import LIMITS
from baton.runtime.errors import ConfigError

_CURVE = "loss.png"
_EVALUATION = "evaluation.json"
SHIPPED_FILES = (
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def ship(folder: Path, into: Path) -> None:
    """Copy both models from `folder`. Raises ConfigError if a part is missing, or a figure of
    the evaluation is below its limit."""
    wanted = [folder / name / file for name in (EMBEDDED, EMBEDDED_DRAFT) for file in SHIPPED_FILES]
    wanted += [folder / _CURVE, folder / _EVALUATION]
    missing = [path for path in wanted if not path.is_file()]
    if missing:
        raise ConfigError(f"{missing[0]} is missing: run `make models` to its end")
    figures = json.loads((folder / _EVALUATION).read_text())
    low = [f"{name} {figures[name]}" for name, least in LIMITS.items() if figures[name] < least]
    if low:
        raise ConfigError(f"the models are below their limits: {', '.join(low)}")
    for name in (EMBEDDED, EMBEDDED_DRAFT):
        shutil.rmtree(into / name, ignore_errors=True)
        shutil.copytree(folder / name, into / name)
    shutil.copy(folder / _CURVE, into / EMBEDDED / _CURVE)
    shutil.copy(folder / _EVALUATION, into / EMBEDDED / _EVALUATION)


def main(arguments: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description="Put the trained models into the package")
    made.add_argument("--folder", type=Path, default=Path("build/models"))
    made.add_argument("--into", type=Path, default=Path(__file__).parent)
    options = made.parse_args(arguments)
    try:
        ship(options.folder, options.into)
    except ConfigError as error:
        made.exit(1, f"{error}\n")
    print(f"both models are in {options.into}")


if __name__ == "__main__":
    main()
