from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.checkpoint.shard_files import INDEX_FILE, SINGLE_FILE, shard_files
from baton.runtime.errors import ModelError
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness


def index(folder, weight_map):
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_one_file_is_a_model(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).touch()
    assert shard_files(tmp_path) == (tmp_path / SINGLE_FILE,)


def test_an_index_names_each_file_once_in_order(tmp_path: Path) -> None:
    index(tmp_path, {"c": "2.safetensors", "a": "1.safetensors", "b": "2.safetensors"})
    for name in ("1.safetensors", "2.safetensors"):
        (tmp_path / name).touch()
    assert shard_files(tmp_path) == (tmp_path / "1.safetensors", tmp_path / "2.safetensors")


def test_a_missing_shard_is_named_with_a_tensor_it_holds(tmp_path: Path) -> None:
    index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    (tmp_path / "1.safetensors").touch()
    with pytest.raises(ModelError, match=rf"2\.safetensors: shard of {INDEX_FILE} is missing"):
        shard_files(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({}, "weight_map: is empty"),
        ({"a": "../1.safetensors"}, "not a plain file name"),
        ({"a": 1}, "1 is not a plain file name"),
    ],
)
def test_an_index_that_is_none_is_refused(
    tmp_path: Path, weight_map: JsonObject, words: str
) -> None:
    index(tmp_path, weight_map)
    with pytest.raises(ModelError, match=words):
        shard_files(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"neither {SINGLE_FILE} nor {INDEX_FILE}"):
        shard_files(tmp_path)


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import baton.engine.checkpoint.shard_files"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60 * slowness())
