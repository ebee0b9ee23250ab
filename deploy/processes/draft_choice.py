"""Which draft model or EAGLE-3 head a worker loads beside its model, and what identifies it.

Reads settings and folders; loads nothing. Keeps the fingerprint, which takes a while to read.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from baton.engine.checkpoint.fingerprint import model_fingerprint
from baton.runtime.config import WorkerConfig
from baton.runtime.errors import ConfigError

_NAMES = {"draft": "a draft model", "eagle3": "an EAGLE-3 head"}


def draft_folder(settings: WorkerConfig, model_folder: Path) -> Path | None:
    """Return the folder of the draft model or head; None unless `worker.speculate` is draft or
    eagle3. Raises ConfigError where there is no such folder."""
    mode = settings.speculate
    if mode not in _NAMES:
        return None
    if settings.draft_model:
        folder = Path(settings.draft_model).expanduser()
    else:
        folder = model_folder.with_name(f"{model_folder.name}-{mode}")
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"worker.speculate is {mode} and {folder} holds no model: give the folder of "
            f"{_NAMES[mode]} as --speculate {mode}=FOLDER or worker.draft_model, or speculate by "
            "ngram or suffix"
        )
    return folder


@lru_cache(maxsize=4)
def draft_fingerprint(settings: WorkerConfig, model_folder: Path) -> str | None:
    """Return the fingerprint of the draft model or head; None where there is none."""
    folder = draft_folder(settings, model_folder)
    return None if folder is None else model_fingerprint(folder, settings.max_context)
