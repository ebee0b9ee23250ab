"""The models that come with the package, as Hugging Face folders: baton-tiny, which is served
where no model is given, and the draft that goes with it.

`make models` trains them, `make ship` puts them here. Knows nothing of what is in them.
"""

from __future__ import annotations

from pathlib import Path

from baton.runtime.errors import ModelError

EMBEDDED = "baton-tiny"
EMBEDDED_DRAFT = "baton-tiny-draft"


def embedded_model() -> Path:
    """The folder of baton-tiny. Raises ModelError if this installation has none."""
    return _folder(EMBEDDED)


def embedded_draft() -> Path:
    """The folder of its draft model. Raises ModelError if this installation has none."""
    return _folder(EMBEDDED_DRAFT)


def _folder(name: str) -> Path:
    folder = Path(__file__).parent / name
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"this installation came without {name}: give a model folder or a hub id, or install "
            "baton-serve again"
        )
    return folder
