from __future__ import annotations

import json
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.checkpoint.shards import Shards
from baton.runtime.errors import ModelError

TENSORS = {
    "whole": torch.arange(12, dtype=torch.float32).view(3, 4),
    "half": torch.randn(5).to(torch.bfloat16),
    "code": torch.arange(-3, 4, dtype=torch.int8),
    "after": torch.tensor([7, 8, 9], dtype=torch.int64),
    "eight": torch.tensor([1.0, -448.0, 0.25]).to(torch.float8_e4m3fn),
    "none": torch.empty(0, 4),
    "one": torch.tensor(2.5),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def written(folder, header, data=b""):
    """A file with this header, as a careless or hostile writer would leave it."""
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("name", TENSORS)
def test_every_kind_is_read_as_it_was_written(folder: Path, name: str) -> None:
    shards = Shards(folder)
    stored = shards.find(name)
    with shards.open(name) as found:
        assert found.dtype == TENSORS[name].dtype
        assert stored.shape == tuple(found.shape) == tuple(TENSORS[name].shape)
        assert bytes(found.flatten().view(torch.uint8).numpy()) == bytes(
            TENSORS[name].flatten().view(torch.uint8).numpy()
        )


def test_a_tensor_at_an_odd_place_is_read(tmp_path: Path) -> None:
    entries = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "wide": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    written(tmp_path, entries, b"abc" + torch.tensor([1.5, -2.0]).numpy().tobytes())
    with Shards(tmp_path).open("wide") as found:
        assert found.tolist() == [1.5, -2.0]


def test_threads_read_at_once_and_the_bytes_are_counted(folder: Path) -> None:
    reported = []
    shards = Shards(folder, lambda done, total: reported.append((done, total)))

    def read(name):
        with shards.open(name) as found:
            return found.clone()

    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(TENSORS, pool.map(read, TENSORS), strict=True))
    assert found["whole"].tolist() == TENSORS["whole"].tolist()
    total = sum(tensor.numel() * tensor.element_size() for tensor in TENSORS.values())
    assert reported[-1] == (total, total)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert not list(shards.unused())


def test_unopened_shards_are_known_and_reported_at_the_end(folder: Path) -> None:
    reported = []
    shards = Shards(folder, lambda done, total: reported.append(total - done))
    with shards.open("whole"):
        pass
    assert [tensor.name for tensor in shards.unused()] == sorted(TENSORS.keys() - {"whole"})
    shards.finish()
    assert reported[-1] == 0


def test_released_pages_are_read_again(tmp_path: Path) -> None:
    wanted = torch.arange(5 * mmap.PAGESIZE, dtype=torch.int32)
    save_file({"long": wanted}, tmp_path / "model.safetensors")
    shards = Shards(tmp_path)
    for _ in range(2):
        with shards.open("long") as found:
            assert torch.equal(found, wanted)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match="tensor other is in none of its 1"):
        Shards(folder).find("other")


def test_a_cut_file_names_the_tensor_its_shape_and_both_ends(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    sizes = f"{whole - 1} of its {whole} bytes"
    with pytest.raises(ModelError, match=rf"tensor \S+ \[.*ends at byte {whole}.* {sizes}"):
        Shards(folder)


def test_an_unknown_dtype_is_named_when_it_is_read(tmp_path: Path) -> None:
    entry = {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}
    written(tmp_path, {"odd": entry}, bytes(1))
    with (
        pytest.raises(ModelError, match=r"tensor odd \[2\] has the unknown dtype F4"),
        Shards(tmp_path).open("odd"),
    ):
        pass


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({"twice": torch.ones(2) * number}, tmp_path / f"part-{number}.safetensors")
    weight_map = {"twice": "part-1.safetensors", "other": "part-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"part-2\.safetensors: tensor twice .* part-1"):
        Shards(tmp_path)
