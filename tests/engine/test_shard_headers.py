from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.checkpoint.shard_headers import DTYPE_BYTES, read_header
from baton.engine.checkpoint.shards import DTYPES
from baton.runtime.errors import ModelError
from tests.support.machine_speed import slowness

TWO = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]},
    "__metadata__": {"format": "pt"},
}


def written(folder, header, data=b""):
    """A file with this header, as a careless or hostile writer would leave it."""
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_tensors_are_found_with_their_places(tmp_path: Path) -> None:
    path = written(tmp_path, TWO, bytes(16))
    found = {tensor.name: tensor for tensor in read_header(path)}
    assert (found["b"].dtype, found["b"].shape, found["b"].path) == ("BF16", (2, 2), path)
    assert found["b"].end == path.stat().st_size and found["a"].end == found["b"].start


@pytest.mark.parametrize("lacking", [1, 8, 15, 16])
def test_a_file_that_was_cut_is_named_with_both_sizes(tmp_path: Path, lacking: int) -> None:
    path = written(tmp_path, TWO, bytes(16))
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-lacking])
    said = rf"model\.safetensors: tensor [ab] .* {whole - lacking} of its {whole} bytes: it is"
    with pytest.raises(ModelError, match=said):
        read_header(path)


def test_a_file_cut_in_its_header_is_named_with_its_size(tmp_path: Path) -> None:
    path = written(tmp_path, TWO)
    length = path.stat().st_size - 8
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ModelError, match=rf"the header has {length} bytes in a file of 50"):
        read_header(path)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, r"\[2\].*needs 8 bytes.*has 4"),
        ({"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}, "has the byte range"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "has the byte range"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, "has the byte range"),
        ({"dtype": "F32", "shape": [1]}, "not a readable"),
        ({"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}, "not a readable"),
        ("F32", "not a readable"),
    ],
)
def test_an_entry_that_lies_is_refused(tmp_path: Path, entry: object, said: str) -> None:
    path = written(tmp_path, {"bad": entry}, bytes(8))
    with pytest.raises(ModelError, match=said):
        read_header(path)


@pytest.mark.parametrize("header", [b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b""])
def test_a_header_that_is_none_is_refused(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        read_header(written(tmp_path, header))


def test_every_kind_has_the_size_that_torch_gives_it() -> None:
    assert {kind: dtype.itemsize for kind, dtype in DTYPES.items()} == DTYPE_BYTES


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import baton.engine.checkpoint.shard_headers"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60 * slowness())
