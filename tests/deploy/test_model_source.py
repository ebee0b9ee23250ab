"""MODEL as a folder, a hub id or nothing; each mistake gets a message with its remedy."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from baton.deploy.model_source import EMBEDDED_NAME, HUB_FILES, find_model
from baton.runtime.errors import ModelError


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = find_model(str(tmp_path))
    assert (found.folder, found.name, found.random) == (tmp_path, tmp_path.name, False)


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


def test_nothing_is_the_embedded_model_and_says_that_it_is_random() -> None:
    found = find_model(None)
    assert found.random and found.name == EMBEDDED_NAME
    assert (found.folder / "config.json").is_file()


@pytest.mark.parametrize(
    "name",
    ["modeling_x.py", "pytorch_model.bin", "model.pt", "model.pth", "x.pkl", "x.npy", "a/b.py"]
    + ["tokenizer.pickle", "x.so", "setup.cfg", "x.gguf", "x.ckpt", "x.msgpack", "x.h5"],
)
def test_nothing_that_runs_is_fetched_from_a_hub(name: str) -> None:
    assert not any(fnmatch.fnmatch(name, pattern) for pattern in HUB_FILES)


class Hub(BaseHTTPRequestHandler):
    """A hub that has no model, and one whose terms must be accepted first."""

    def do_GET(self) -> None:
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(60)
    server.server_close()


def ask_hub(hub_id: str, tmp_path: Path, **environment: str) -> str:
    """The message of the ModelError that `find_model` raises in a process of its own."""
    code = (
        "import sys\n"
        "from baton.deploy.model_source import find_model\n"
        "from baton.runtime.errors import ModelError\n"
        "try:\n    find_model(sys.argv[1])\n"
        "except ModelError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, hub_id],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"HF_HOME": str(tmp_path)} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_hub_without_the_model(hub: str, tmp_path: Path) -> None:
    said = ask_hub("owner/name", tmp_path, HF_ENDPOINT=hub)
    assert "no such model" in said and "HF_TOKEN" in said


def test_a_model_whose_terms_were_not_accepted(hub: str, tmp_path: Path) -> None:
    assert "owner/gated is gated" in ask_hub("owner/gated", tmp_path, HF_ENDPOINT=hub)


@pytest.mark.parametrize("how", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_no_way_to_the_hub(tmp_path: Path, how: dict[str, str]) -> None:
    said = ask_hub("owner/name", tmp_path, **how)
    assert "cannot be reached" in said and "give its folder" in said
