"""MODEL as a folder, a hub id or nothing; each mistake gets a message with its remedy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from baton.deploy.serve import hub
from baton.deploy.serve.model_source import check_model, find_model
from baton.engine.checkpoint.shard_headers import read_header
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.runtime.errors import ModelError
from tests.support.machine_speed import slowness


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = find_model(str(tmp_path))
    assert (found.folder, found.name, found.demonstration) == (tmp_path, tmp_path.name, False)


def test_a_relative_folder_and_a_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("owner/name").folder == folder  # a folder wins over a hub id
    assert find_model("~/owner/name").folder == folder


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("empty", "no config.json"),
        ("file", "is a file"),
        ("./missing", "no folder ./missing"),
        ("/no/such/model", "no folder /no/such/model"),
        ("just-a-name", "owner/name"),
        ("a/b/c", "owner/name"),
        ("bad id/name", "owner/name"),
        ("owner/name@", "owner/name@revision"),
        ("owner/name@a@b", "owner/name@revision"),
        ("owner/name@../x", "owner/name@revision"),
        ("owner/name@refs/../x", "owner/name@revision"),
        ("owner/name@--x", "owner/name@revision"),
        ("owner/@main", "owner/name@revision"),
    ],
)
def test_what_is_no_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=words):
        find_model(given)


def test_an_empty_source_is_the_embedded_demonstration_model() -> None:
    found = find_model(None)
    assert found.demonstration and found.name == "baton-tiny"
    assert (found.folder / "config.json").is_file()


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "bytes"])
def test_a_model_unfit_for_workers_is_refused_without_torch(tmp_path: Path, broken: str) -> None:
    """`check_model` says, in a process that has no torch, what `build_runner` says."""
    shutil.copytree(find_model(None).folder, tmp_path, dirs_exist_ok=True)
    check_model(tmp_path, 0)
    if broken == "config.json":
        (tmp_path / broken).write_text('{"architectures": ["NewForCausalLM"]}')
    elif broken == "bytes":
        os.truncate(tmp_path / "model.safetensors", 1 << 20)
    else:
        (tmp_path / broken).unlink()
    with pytest.raises(ModelError) as refused:
        build_runner(tmp_path, EngineOptions(blocks=64))
    assert broken in str(refused.value)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from baton.deploy.serve.model_source import check_model\n"
        "from baton.runtime.errors import ModelError\n"
        "try:\n    check_model(Path(sys.argv[1]), 0)\n"
        "except ModelError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60 * slowness(),
    )
    assert (done.stdout, done.stderr) == (f"{refused.value}\n", "")


def test_a_hub_id_is_printed_before_it_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[object] = []

    def fetch(
        hub_id: str, stopped: Callable[[], bool], revision: str | None, files: Sequence[str]
    ) -> Path | None:
        assert files is hub.FILES
        events.append((hub_id, revision))
        return None if stopped() else tmp_path

    monkeypatch.setattr(hub, "fetch", fetch)
    found = find_model("owner/name", events.append)
    assert found is not None and (found.folder, found.name) == (tmp_path, "owner/name")
    assert events == ["fetching owner/name from the hub", ("owner/name", None)]
    assert find_model("owner/name", events.append, lambda: True) is None
    pinned = find_model("owner/name@refs/pr/1", events.append)
    assert pinned is not None and pinned.name == "owner/name"  # clients name no revision
    said = "fetching owner/name@refs/pr/1 from the hub"
    assert events[-2:] == [said, ("owner/name", "refs/pr/1")]


def test_a_shard_that_was_cut_short_is_named_with_both_sizes(tmp_path: Path) -> None:
    """As a download that was broken off leaves it: the index and the other shards are whole."""
    shutil.copytree(find_model(None).folder, tmp_path, dirs_exist_ok=True)
    whole = tmp_path / "model.safetensors"
    names = [tensor.name for tensor in read_header(whole)]
    shards = [tmp_path / f"model-{number}-of-2.safetensors" for number in (1, 2)]
    for shard in shards:
        shutil.copyfile(whole, shard)
    files = {name: shards[index % 2].name for index, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    check_model(tmp_path, 0)
    expected = shards[1].stat().st_size
    os.truncate(shards[1], expected - 1000)
    with pytest.raises(ModelError, match=f"{shards[1].name}.* {expected - 1000} of its {expected}"):
        check_model(tmp_path, 0)
