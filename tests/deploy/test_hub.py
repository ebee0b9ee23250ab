"""Fetching from a hub of this host: what it refuses, what it gives, and Ctrl-C in the midst of
it."""

from __future__ import annotations

import fnmatch
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from baton.deploy.serve import hub
from baton.runtime.errors import ModelError
from tests.support.machine_speed import slowness
from tests.support.waiting import wait_until

COMMIT, TAGGED = "0123456789abcdef0123456789abcdef01234567", "abcdef" * 6 + "abcd"
REVISIONS = {"": COMMIT, "main": COMMIT, COMMIT: COMMIT, "v1": TAGGED, TAGGED: TAGGED}
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"not asked for"}
ENDLESS_FILE = ("slow", "model.safetensors")
ENDLESS = 1 << 30  # bytes
SERVE = [sys.executable, "-P", "-m", "baton.deploy.cli.main", "serve", "--launcher", "process"]


class Hub(BaseHTTPRequestHandler):
    """Has two models: `owner/slow`, whose weights never end to come, and `owner/fast`. Of
    `owner/gated` the terms were not accepted; others it has not. The tag v1 is another commit
    than the newest; files bear the commit that they are asked of."""

    trickling = threading.Event()
    ending = threading.Event()
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        Hub.asked.append(self.path)
        owner, _, name = self.path.removeprefix("/api/models").strip("/").partition("/")
        model, _, rest = name.partition("/")
        if owner != "owner" or model not in ("slow", "fast"):
            gated = model == "gated"
            code = "GatedRepo" if gated else "RepoNotFound"
            self._begin(403 if gated else 404, 0, **{"X-Error-Code": code})
        elif rest.startswith("revision/") and rest.partition("/")[2] not in REVISIONS:
            self._begin(404, 0, **{"X-Error-Code": "RevisionNotFound"})
        elif self.path.startswith("/api/"):
            commit = REVISIONS[rest.partition("/")[2] if rest.startswith("revision/") else ""]
            tree = [
                {"type": "file", "path": file, "size": self._size(model, file), "oid": file}
                for file in FILES
            ]
            found = {"id": f"owner/{model}", "sha": commit, "siblings": []}
            self._send(json.dumps(tree if rest.startswith("tree/") else found).encode())
        else:
            _, commit, file = rest.split("/")
            reported = {"ETag": f'"{commit}{file}"', "X-Repo-Commit": commit}
            if (model, file) == ENDLESS_FILE:
                self._trickle(reported)
            else:
                self._send(FILES[file], **reported)

    do_HEAD = do_GET

    def _send(self, body: bytes, **headers: str) -> None:
        self._begin(200, len(body), **headers)
        if self.command == "GET":
            self.wfile.write(body)

    def _size(self, model: str, file: str) -> int:
        return ENDLESS if (model, file) == ENDLESS_FILE else len(FILES[file])

    def _trickle(self, headers: dict[str, str]) -> None:
        self._begin(200, ENDLESS, **headers)
        while self.command == "GET" and not Hub.ending.is_set():
            try:
                self.wfile.write(b".")
            except OSError:
                return  # whoever read it is gone
            Hub.trickling.set()
            # The server sends so slowly that the download never ends.
            time.sleep(0.01)

    def _begin(self, status: int, size: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(size)}).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """All that is fetched comes from this hub, into a cache of this test."""
    Hub.trickling.clear()
    Hub.ending.clear()
    Hub.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield
    Hub.ending.set()
    server.shutdown()
    thread.join(60)
    server.server_close()


def refused(hub_id: str) -> str:
    with pytest.raises(ModelError) as found:
        hub.fetch(hub_id, lambda: False)
    return str(found.value)


def children() -> list[int]:
    """Processes that this one has started and that still are."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_a_model_is_fetched_without_what_is_no_part_of_it() -> None:
    folder = hub.fetch("owner/fast", lambda: False)
    assert folder is not None
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors")
    }


def test_a_models_shape_is_fetched_without_its_weights() -> None:
    folder = hub.fetch("owner/slow", lambda: False, files=hub.SHAPE_FILES)
    assert folder is not None
    assert [path.name for path in folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize("revision", ["v1", TAGGED, "", "main"])
def test_every_file_is_of_the_revision_that_was_asked_for(revision: str) -> None:
    """Side files as well as weights: after the first answer no other name is asked for."""
    folder = hub.fetch("owner/fast", lambda: False, revision)
    commit = REVISIONS[revision]
    assert folder is not None and folder.name == commit
    files = [path for path in Hub.asked if not path.startswith("/api/")]
    assert {path.rpartition("/")[2] for path in files} == {"config.json", "model.safetensors"}
    assert all(path.startswith(f"/owner/fast/resolve/{commit}/") for path in files), files


def test_a_revision_that_the_hub_has_not_is_named() -> None:
    with pytest.raises(ModelError, match="owner/fast has no revision v2: give a commit, tag"):
        hub.fetch("owner/fast", lambda: False, "v2")


@pytest.mark.parametrize(
    "name",
    ["modeling_x.py", "pytorch_model.bin", "model.pt", "model.pth", "x.pkl", "x.npy", "a/b.py"]
    + ["tokenizer.pickle", "x.so", "setup.cfg", "x.gguf", "x.ckpt", "x.msgpack", "x.h5"],
)
def test_nothing_that_runs_is_fetched_from_a_hub(name: str) -> None:
    assert not any(fnmatch.fnmatch(name, pattern) for pattern in hub.FILES)


def test_a_hub_without_the_model() -> None:
    said = refused("owner/name")
    assert "no such model" in said and "HF_TOKEN" in said


def test_a_model_whose_terms_were_not_accepted() -> None:
    assert "owner/gated is gated" in refused("owner/gated")


@pytest.mark.parametrize(
    ("name", "value"), [("HF_ENDPOINT", "http://127.0.0.1:9"), ("HF_HUB_OFFLINE", "1")]
)
def test_no_way_to_the_hub(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    said = refused("owner/name")
    assert "cannot be reached" in said and "give its folder" in said


def test_a_child_that_breaks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "owner/fast ended with exit code 1" in refused("owner/fast")


def test_a_stop_ends_the_download_and_its_process() -> None:
    before = children()
    assert hub.fetch("owner/slow", Hub.trickling.is_set) is None
    assert Hub.trickling.is_set()
    assert children() == before


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, marks=pytest.mark.nightly),
    ],
)
def test_serve_ends_at_once_while_it_fetches(number: signal.Signals) -> None:
    """By Ctrl-C in good order; and however it ends, the download ends with it."""
    served = subprocess.Popen(
        [*SERVE, "owner/slow", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the bars of the hub's library
        text=True,
    )
    try:
        assert served.stdout is not None
        assert "fetching owner/slow from the hub" in served.stdout.readline()
        assert Hub.trickling.wait(30 * slowness())
        (child,) = Path(f"/proc/{served.pid}/task/{served.pid}/children").read_text().split()
        began = time.monotonic()
        served.send_signal(number)
        out, _ = served.communicate(timeout=30 * slowness())
        assert served.returncode == (-number if number is signal.SIGKILL else 0)
        assert out == "" and time.monotonic() - began < 20 * slowness()
        wait_until(lambda: not Path(f"/proc/{child}").exists())
    finally:
        served.kill()
        served.communicate(timeout=30)
