"""From what the user typed as MODEL to a folder on this host.

A local folder, a hub id (`owner/name`, fetched or taken from the hub's own cache), or nothing:
the embedded model. Knows no weights; only that a model folder has a config.json. The hub's
exceptions are translated here, and only here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from baton.runtime.errors import ModelError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
EMBEDDED_NAME = "baton-embedded"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`name` is what clients put in the `model` field."""

    folder: Path
    name: str
    random: bool = False  # random weights: the answers are noise


def find_model(given: str | None) -> ModelSource:
    """The model's folder; may download. Raises ModelError naming the remedy."""
    if given is None:
        return _embedded()
    folder = Path(given).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{folder} has no config.json: give the folder of a Hugging Face model"
            )
        return ModelSource(folder.resolve(), folder.resolve().name)
    if folder.exists():
        raise ModelError(f"{folder} is a file: give the folder that holds the model's config.json")
    if given.startswith(("/", ".", "~")) or not HUB_ID.fullmatch(given):
        raise ModelError(
            f"there is no folder {given}: give a model folder, or a hub id such as owner/name"
        )
    return ModelSource(_from_hub(given), given)


def _embedded() -> ModelSource:
    from baton.models.random_model import embedded_model

    return ModelSource(embedded_model(), EMBEDDED_NAME, random=True)


def _from_hub(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise ModelError(
            "hub ids need huggingface_hub: pip install 'baton-serve[worker]', or give a folder"
        ) from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except GatedRepoError as error:
        raise ModelError(
            f"{hub_id} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no folder {hub_id}, and the hub has no such model for you: check the "
            "spelling; for a private one set HF_TOKEN"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"there is no folder {hub_id}, and the hub cannot be reached "
            f"({' '.join(str(error).split())}): "
            "download the model elsewhere and give its folder"
        ) from error
