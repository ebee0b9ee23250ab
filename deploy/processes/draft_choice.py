"""Which draft model a worker loads beside its model, and what identifies it.

Reads settings and folders; loads nothing. Keeps the fingerprint, which takes a while to read.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from baton.engine.checkpoint.fingerprint import model_fingerprint
from baton.runtime.config import WorkerConfig
from baton.runtime.errors import ConfigError


def draft_folder(settings: WorkerConfig, model_folder: Path) -> Path | None:
    """Return the folder of the draft model; None unless `worker.speculate` is draft. Raises
    ConfigError where there is no such folder."""
    if settings.speculate != "draft":
        return None
    if settings.tp != 1:
        raise ConfigError(
            f"worker.speculate is draft and worker.tp {settings.tp}: a draft model runs in workers "
            "of one process; set worker.tp to 1, or speculate by ngram or suffix"
        )
    if settings.draft_model:
        folder = Path(settings.draft_model).expanduser()
    else:
        folder = model_folder.with_name(f"{model_folder.name}-draft")
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"worker.speculate is draft and {folder} holds no model: give the folder of a draft "
            "model as --speculate draft=FOLDER or worker.draft_model, or speculate by ngram or "
            "suffix"
        )
    return folder


@lru_cache(maxsize=4)
def draft_fingerprint(settings: WorkerConfig, model_folder: Path) -> str:
    """Return the fingerprint of the draft model; empty where there is none."""
    folder = draft_folder(settings, model_folder)
    return "" if folder is None else model_fingerprint(folder, settings.max_context)
