"""The Python files of the checkout, for tests over the text of all code."""

from __future__ import annotations

from pathlib import Path

from baton.proto.generate import GENERATED

ROOT = Path(__file__).resolve().parent.parent.parent
NO_CODE = {"build", "docs", "requirements", "results"}
GENERATED_SUFFIXES = tuple(pattern.removeprefix("*") for pattern in GENERATED)


def all_code() -> list[Path]:
    """Return every Python file of the checkout but what is generated from proto/."""
    folders = [
        folder
        for folder in ROOT.iterdir()
        if folder.is_dir() and folder.name not in NO_CODE and not folder.name.startswith(".")
    ]
    files = [*ROOT.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    return sorted(file for file in files if not file.name.endswith(GENERATED_SUFFIXES))
