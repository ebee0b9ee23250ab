"""Which safetensors files hold a model, and that all of them are there.

Apart from what reads them (shards.py), because whoever starts workers asks this first, without
torch. Opens the index alone; keeps no state.
"""

from __future__ import annotations

import json
from pathlib import Path

from baton.engine.spec.config_fields import read_fields
from baton.runtime.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def shard_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model, in order of name. Raises ModelError if one is missing."""
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise ModelError(
                f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors "
                "weights are read"
            )
        return (folder / SINGLE_FILE,)
    fields = read_fields(index).section("weight_map")
    places = {name: folder / _file_name(index, file) for name, file in fields.values.items()}
    if not places:
        raise ModelError(f"{index}: weight_map: is empty; download the file again")
    files = tuple(sorted(set(places.values())))
    for path in files:
        if not path.exists():
            held = next(name for name, place in places.items() if place == path)
            raise ModelError(
                f"{path}: missing shard, named by {INDEX_FILE} (it holds {held}); download it"
            )
    return files


def _file_name(index: Path, name: object) -> str:
    """A plain file name: an index may not point out of its folder."""
    if not isinstance(name, str) or Path(name).name != name:
        raise ModelError(f"{index}: weight_map: {json.dumps(name)} is not a plain file name")
    return name
