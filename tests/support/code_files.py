"""The Python files and the pages of the checkout, for tests over the text of all of them."""

from __future__ import annotations

import subprocess
from functools import cache
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


@cache
def tracked_pages(root: Path = ROOT) -> tuple[str, ...]:
    """Return the paths of the Markdown files that git tracks, without deleted ones; in a checkout
    without git all of them, outside folders of what was made."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=root, text=True, capture_output=True, check=False
    )
    if not listed.returncode:
        return tuple(path for path in listed.stdout.split() if (root / path).exists())
    found = sorted(page.relative_to(root) for page in root.rglob("*.md"))
    return tuple(
        str(page)
        for page in found
        if page.parts[0] not in {"build", "results"} and not page.parts[0].startswith(".")
    )
