"""Finds the folder of the MODEL that the user named.

A local folder, a hub id (`owner/name` or `owner/name@revision`, fetched or taken from the hub's
own cache), or nothing: the embedded model. Looks at a folder as far as that goes without torch;
weights it never reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.deploy.serve import hub
from baton.engine.checkpoint.shard_files import shard_files
from baton.engine.checkpoint.shard_headers import read_header
from baton.engine.spec.model_spec import read_spec
from baton.models.embedded import EMBEDDED, embedded_model
from baton.runtime.errors import ModelError

HUB_ID = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*))?"
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`name` is what clients put in the `model` field."""

    folder: Path
    name: str
    demonstration: bool = False  # the embedded model: it knows a small world of its own


def find_model(
    given: str | None,
    say: Callable[[str], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
    files: Sequence[str] = hub.FILES,
) -> ModelSource | None:
    """Return the model's folder. It may download the model's `files`, which `say` reports first;
    None if `stopped` ended the download. Raises ModelError with the remedy."""
    if given is None:
        return ModelSource(embedded_model(), EMBEDDED, demonstration=True)
    folder = Path(given).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{folder} has no config.json: give the folder of a Hugging Face model"
            )
        return ModelSource(folder.resolve(), folder.resolve().name)
    if folder.exists():
        raise ModelError(f"{folder} is a file: give the folder that holds the model's config.json")
    found = HUB_ID.fullmatch(given)
    if given.startswith(("/", ".", "~")) or found is None:
        raise ModelError(
            f"there is no folder {given}: give a model folder, or a hub id such as owner/name or "
            "owner/name@revision"
        )
    say(f"fetching {given} from the hub")
    fetched = hub.fetch(found["name"], stopped, found["revision"], files)
    return None if fetched is None else ModelSource(fetched, found["name"])


def check_model(folder: Path, max_context: int) -> None:
    """Raise the ModelError that every worker would end with, as far as it can be known without
    torch: what config.json describes is not served, or a file of weights is missing, cut short
    or none. Their headers are read, not their weights. `max_context` as in `worker.max_context`.
    """
    read_spec(folder, max_context)
    for path in shard_files(folder):
        read_header(path)
