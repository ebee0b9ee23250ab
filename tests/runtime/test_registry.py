"""Registries: the newest announcement wins, old ones fade, rubbish is passed over."""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import pytest

from baton.runtime import registry as registries
from baton.runtime.errors import ConfigError
from baton.runtime.registry import DirectoryRegistry, MemoryRegistry, Registry, WorkerRecord

ONE = WorkerRecord("decode-0", "a" * 32, "decode", "127.0.0.1:1", "127.0.0.1:2", "m", 10)
TWO = WorkerRecord("prefill-0", "b" * 32, "prefill", "127.0.0.1:3", "127.0.0.1:4", "m", 11)


@pytest.fixture(params=["directory", "memory"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    return MemoryRegistry() if request.param == "memory" else DirectoryRegistry(tmp_path / "w")


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.2:9000", "10.0.0.2"),
        ("worker.llm:9000", "worker.llm"),
        ("[fd00::2]:9000", "fd00::2"),
    ],
)
def test_a_records_host_is_that_of_its_address(address: str, host: str) -> None:
    assert replace(ONE, address=address).host == host


def test_announced_workers_are_listed(registry: Registry) -> None:
    assert registry.workers() == []
    registry.announce(TWO)
    registry.announce(ONE)
    registry.announce(ONE)
    assert sorted(registry.workers(), key=lambda record: record.worker_id) == [ONE, TWO]


def test_the_newest_start_of_a_worker_wins(registry: Registry) -> None:
    registry.announce(ONE)
    again = replace(ONE, boot_id="c" * 32, address="127.0.0.1:9")
    registry.announce(again)
    assert registry.workers() == [again]


def test_a_worker_withdraws_only_its_own_start(registry: Registry) -> None:
    again = replace(ONE, boot_id="c" * 32)
    registry.announce(again)
    registry.withdraw(ONE.worker_id, ONE.boot_id)  # the old process, late
    assert registry.workers() == [again]
    registry.withdraw(ONE.worker_id, again.boot_id)
    registry.withdraw(ONE.worker_id, again.boot_id)
    registry.withdraw("never-seen", again.boot_id)
    assert registry.workers() == []


def test_an_announcement_fades_and_comes_back(tmp_path: Path) -> None:
    registry = DirectoryRegistry(tmp_path, ttl_s=15.0)
    registry.announce(ONE)
    file = tmp_path / "decode-0.worker"
    old = time.time() - 16.0
    os.utime(file, (old, old))
    assert registry.workers() == []
    registry.announce(ONE)
    assert registry.workers() == [ONE]


RUBBISH = [b"", b"{", b"[]", b"1", b"null", b"\xff\xfe", b'{"worker_id": "x"}', b'{"unknown": 1}']
RUBBISH += [b"[" * 60_000, b'{"a":' * 12_000, b" " * 60_000]
FIELDS: list[dict[str, object]] = [{"boot_id": 7}, {"address": 7}, {"pid": "1"}, {"memory": None}]
FIELDS += [{"role": "router"}, {"role": ["decode"]}, {"boot_id": "a" * 31}, {"boot_id": "A" * 32}]
FIELDS += [{"boot_id": "a " * 16}, {"boot_id": "a" * 32 + "\n"}, {"new": 1}]


def nested(depth: int) -> object:
    found: object = "m"
    for _ in range(depth):
        found = [found]
    return found


FIELDS += [{"memory": nested(600)}, {"proof": nested(600)}]  # JSON's own limit is beyond


@pytest.mark.parametrize("content", RUBBISH)
def test_invalid_entries_are_skipped_and_reported(tmp_path: Path, content: bytes) -> None:
    registry = DirectoryRegistry(tmp_path)
    registry.announce(ONE)
    (tmp_path / "rubbish.worker").write_bytes(content)
    (tmp_path / "decode-1.half.draft").write_bytes(b"{")
    assert registry.workers() == [ONE]
    assert registry.faults() == {"rubbish": "it is not what a worker of this version writes"}
    registry.withdraw("rubbish", "x")
    (tmp_path / "rubbish.worker").unlink()
    assert registry.workers() == [ONE] and registry.faults() == {}


@pytest.mark.parametrize("change", FIELDS, ids=lambda change: str(change)[:50])
def test_an_impossible_field_is_reported(tmp_path: Path, change: dict[str, object]) -> None:
    registry = DirectoryRegistry(tmp_path, tokens=("s",))
    (tmp_path / "decode-0.worker").write_text(json.dumps(asdict(ONE) | change))
    assert registry.workers() == [] and registry.faults().keys() == {"decode-0"}


def test_an_announcement_without_end_is_not_read_whole(tmp_path: Path) -> None:
    registry = DirectoryRegistry(tmp_path)
    with open(tmp_path / "long.worker", "wb") as file:
        file.truncate(1 << 40)
    assert registry.workers() == [] and "65536 bytes" in registry.faults()["long"]


def test_a_path_that_is_no_file_hides_no_worker(tmp_path: Path) -> None:
    registry = DirectoryRegistry(tmp_path)
    registry.announce(ONE)
    (tmp_path / "folder.worker").mkdir()
    os.mkfifo(tmp_path / "pipe.worker")  # to open it would wait for a writer
    (tmp_path / "broken.worker").symlink_to(tmp_path / "nothing")
    (tmp_path / "round.worker").symlink_to(tmp_path / "round.worker")
    assert registry.workers() == [ONE]
    names = ("broken", "folder", "pipe", "round")
    assert registry.faults() == dict.fromkeys(names, "it is no file")


def test_an_unreadable_file_hides_no_other_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = DirectoryRegistry(tmp_path)
    registry.announce(ONE)
    registry.announce(TWO)

    def refused(path: str, mode: str, **how: Any) -> IO[Any]:
        if Path(path).stem == "decode-0":
            raise PermissionError(13, "Permission denied")
        return open(path, mode, **how)

    monkeypatch.setattr(registries, "open", refused, raising=False)  # root may read everything
    assert registry.workers() == [TWO]
    assert registry.faults() == {"decode-0": "this user may not read it"}


def test_without_descriptors_it_is_not_taken_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = DirectoryRegistry(tmp_path)
    registry.announce(ONE)

    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    for module, name in ((os, "scandir"), (registries, "open")):
        with monkeypatch.context() as short:
            short.setattr(module, name, none_left, raising=False)
            with pytest.raises(OSError, match="Too many"):
                registry.workers()
    assert registry.workers() == [ONE]


def test_a_folder_that_is_gone_is_empty(tmp_path: Path) -> None:
    registry = DirectoryRegistry(tmp_path / "w")
    (tmp_path / "w").rmdir()
    assert registry.workers() == []


def test_an_announcement_is_of_the_worker_that_its_file_names(tmp_path: Path) -> None:
    """Else two files would tell two places of one worker."""
    registry = DirectoryRegistry(tmp_path)
    registry.announce(ONE)
    (tmp_path / "decode-0.worker").rename(tmp_path / "decode-9.worker")
    registry.announce(ONE)
    assert registry.workers() == [ONE]
    assert registry.faults() == {"decode-9": "it is another worker's, 'decode-0'"}


def test_in_memory_the_last_announcement_decides_a_workers_state() -> None:
    registry = MemoryRegistry()
    for _ in range(2):
        registry.announce(ONE)
        assert registry.workers() == [ONE] and registry.faults() == {}
        registry.announce(replace(ONE, boot_id="no"))
        assert registry.workers() == [] and registry.faults().keys() == {"decode-0"}


def test_no_draft_is_left_and_others_of_the_host_cannot_look_in(tmp_path: Path) -> None:
    registry = DirectoryRegistry(tmp_path / "deep" / "folder")
    registry.announce(ONE)
    assert [path.name for path in (tmp_path / "deep/folder").iterdir()] == ["decode-0.worker"]
    assert (tmp_path / "deep/folder").stat().st_mode & 0o077 == 0


def test_an_announcement_without_the_secret_is_passed_over(tmp_path: Path) -> None:
    ours, theirs = (DirectoryRegistry(tmp_path, tokens=(word,)) for word in ("ours", "theirs"))
    ours.announce(ONE)
    theirs.announce(TWO)
    assert ours.workers() == [ONE] and theirs.workers() == [TWO]
    DirectoryRegistry(tmp_path).announce(TWO)  # by whoever has no secret at all
    assert ours.workers() == [ONE]
    assert DirectoryRegistry(tmp_path).workers() == [ONE, TWO]  # for a list, nothing is asked


@pytest.mark.parametrize(
    "change",
    [{"address": "10.0.0.1:1"}, {"boot_id": "f" * 32}, {"role": "prefill"}, {"pid": 1}]
    + [{"proof": ""}, {"proof": None}, {"proof": "é" * 32}, {"proof": "0" * 32}]
    + [{"proof": "\ud800"}, {"model": "\ud800"}],  # no text, and JSON can hold it
)
def test_a_changed_announcement_is_none(tmp_path: Path, change: dict[str, object]) -> None:
    registry = DirectoryRegistry(tmp_path, tokens=("s",))
    registry.announce(ONE)
    file = tmp_path / "decode-0.worker"
    reported = json.loads(file.read_text())
    file.write_text(json.dumps(reported | change))
    assert registry.workers() == []
    file.write_text(json.dumps(reported))
    assert registry.workers() == [ONE]
    registry.withdraw(ONE.worker_id, ONE.boot_id)
    assert not file.exists()


def test_two_registries_of_one_folder_see_each_other(tmp_path: Path) -> None:
    DirectoryRegistry(tmp_path).announce(ONE)
    assert DirectoryRegistry(tmp_path).workers() == [ONE]


@pytest.mark.parametrize("worker_id", ["../x", "a/b", "", "a b", "."])
def test_a_worker_id_cannot_leave_the_folder(tmp_path: Path, worker_id: str) -> None:
    with pytest.raises(ConfigError, match="--worker-id"):
        DirectoryRegistry(tmp_path).announce(replace(ONE, worker_id=worker_id))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"registry .*file/w.*can write"):
        DirectoryRegistry(tmp_path / "file" / "w")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="other users.*0700"):
        DirectoryRegistry(folder)
    folder.chmod(0o755)  # to be read by others does not put an address into it
    assert DirectoryRegistry(folder).workers() == []


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:  # root's own folders are trusted by everyone
        os.chown(tmp_path, 54321, -1)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="other users"):
        DirectoryRegistry(tmp_path)


def test_an_id_of_any_length_cannot_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most"):
        DirectoryRegistry(tmp_path).announce(replace(ONE, worker_id="a" * 5000))
