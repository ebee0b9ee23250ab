"""The list of safetensors files of a model, with a check that none is missing.

The supervisor of workers runs this check first and does not import torch, so the module is
separate from the reader (shards.py). It opens only the index and keeps no state.
"""

from __future__ import annotations

import json
from pathlib import Path

from baton.engine.spec.config_fields import read_fields
from baton.runtime.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def shard_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model, sorted by name. Raises ModelError if one is
    missing."""
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise ModelError(
                f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}; use a model with "
                "safetensors weights"
            )
        return (folder / SINGLE_FILE,)
    fields = read_fields(index).section("weight_map")
    paths_of = {name: folder / _file_name(index, file) for name, file in fields.values.items()}
    if not paths_of:
        raise ModelError(f"{index}: weight_map: is empty; download the file again")
    files = tuple(sorted(set(paths_of.values())))
    for path in files:
        if not path.exists():
            held = next(name for name, each in paths_of.items() if each == path)
            raise ModelError(
                f"{path}: shard of {INDEX_FILE} is missing (it has {held}); download it"
            )
    return files


def _file_name(index: Path, name: object) -> str:
    """Return a plain file name. Raises ModelError: an index may not point outside its folder."""
    if not isinstance(name, str) or Path(name).name != name:
        raise ModelError(f"{index}: weight_map: {json.dumps(name)} is not a plain file name")
    return name
