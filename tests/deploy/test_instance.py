"""The instance's folder: private, one at a time, cleaned up, and safe after a kill -9."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.deploy.host import instance as instances
from baton.deploy.host.instance import Instance, Job
from baton.runtime.errors import ConfigError


def test_the_folder_is_private_and_gone_at_the_end() -> None:
    claimed = Instance.claim("port-1")
    folder = claimed.folder
    claimed.write_environment({"BATON_TOKEN": "secret"})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "environment.json").stat().st_mode) == 0o600
    assert instances.live_instances() == [folder]
    assert claimed.end()
    assert not folder.exists()
    assert instances.live_instances() == []


@pytest.mark.parametrize("swept", [True, False])
def test_a_supervisor_ends_before_the_folder_is_removed(
    monkeypatch: pytest.MonkeyPatch, swept: bool
) -> None:
    """Where it stays all the same, the folder stays for it."""
    monkeypatch.setattr(instances, "STOP_DEADLINE_S", 0.1)
    monkeypatch.setattr(instances, "KILL_S", 0.1)
    claimed = Instance.claim("port-1")
    with (claimed.folder / "decode-0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def sweep() -> None:
            assert claimed.folder.exists()
            if swept:
                fcntl.flock(lock, fcntl.LOCK_UN)

        assert claimed.end(sweep=sweep) == swept
        assert claimed.folder.exists() != swept


def test_a_second_claim_of_the_same_name_names_the_remedy() -> None:
    first = Instance.claim("port-1")
    with pytest.raises(ConfigError, match="--port"):
        Instance.claim("port-1")
    other = Instance.claim("port-2")
    assert first.instance_id != other.instance_id
    assert first.end() and other.end()
    Instance.claim("port-1").end()


def test_a_folder_that_cannot_be_written_names_the_remedy() -> None:
    (instances.runtime_folder() / "port-1").touch()  # a file in its place
    with pytest.raises(ConfigError, match=r"port-1 cannot be written \(.*XDG_RUNTIME_DIR"):
        Instance.claim("port-1")


def test_what_a_killed_instance_left_is_cleared() -> None:
    code = (
        "import os, signal\n"
        "from baton.deploy.host.instance import Instance\n"
        "(Instance.claim('port-1').folder / 'left').write_text('x')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    left = instances.runtime_folder() / "port-1" / "left"
    assert left.exists()
    assert instances.live_instances() == []
    claimed = Instance.claim("port-1")
    assert not left.exists()
    claimed.end()


def test_a_dead_instances_supervisors_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = instances.runtime_folder() / "port-1"
    folder.mkdir()
    (folder / "decode-0.lock").touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys\n"
         "f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX)\n"
         "print(flush=True); sys.stdin.read()", str(folder / "decode-0.lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    began = time.monotonic()
    assert Instance.claim("port-1", lambda: True) is None  # stopped while it waited
    assert time.monotonic() - began < 10
    monkeypatch.setattr(instances, "STOP_DEADLINE_S", 0.1)
    with pytest.raises(ConfigError, match="still run or serve open requests"):
        Instance.claim("port-1")
    holder.communicate(timeout=60)
    Instance.claim("port-1").end()


def test_an_open_runtime_folder_is_refused(runtime_folder: Path) -> None:
    (runtime_folder / "baton").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="0700"):
        instances.runtime_folder()


def test_the_runtime_folder_of_another_user_is_refused(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be that of a running `baton serve`: the message does not say to remove it."""
    (runtime_folder / "baton").mkdir(mode=0o700)
    monkeypatch.setattr(instances.os, "getuid", lambda: 4711)
    with pytest.raises(ConfigError, match="another user: run this as the user of") as refusal:
        instances.runtime_folder()
    assert "remove" not in str(refusal.value)


def test_a_link_in_place_of_the_runtime_folder_is_refused(
    runtime_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (runtime_folder / "baton").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="private folder"):
        instances.runtime_folder()


def test_without_a_session_folder_a_temporary_one_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(instances.tempfile, "gettempdir", lambda: str(tmp_path))
    assert instances.runtime_folder() == tmp_path / f"baton-{os.getuid()}"


def test_jobs_and_environment_come_back_as_written() -> None:
    claimed = Instance.claim("port-1")
    job = Job("decode-0", ("a", "b c"), 2.5)
    claimed.write_job(job)
    claimed.write_environment({"X": "1"})
    assert instances.read_job(claimed.folder, "decode-0") == job
    assert instances.read_environment(claimed.folder) == {
        "X": "1",
        "BATON_INSTANCE": claimed.instance_id,
    }
    assert instances.read_status(claimed.folder, "decode-0") is None
    claimed.end()


def test_a_replaced_file_is_never_seen_half_written(tmp_path: Path) -> None:
    path = tmp_path / "x.status"
    instances.write_private(path, json.dumps({"a": 1}))
    before = path.stat().st_ino
    instances.write_private(path, json.dumps({"a": 2}))
    assert json.loads(path.read_text()) == {"a": 2}
    assert path.stat().st_ino != before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        Instance.claim("port-1")
