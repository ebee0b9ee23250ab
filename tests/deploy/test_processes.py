"""`baton ps`: the state of each job from its files, and figures from workers that give them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from baton.deploy.cli import process_list
from baton.deploy.cli.process_list import fetch_audit, running, show
from baton.deploy.host.instance import Instance, JobState, JobStatus, live_instances, write_private
from baton.runtime import registry_client
from baton.runtime.registry import DirectoryRegistry, Role, WorkerRecord

CLOSED = "127.0.0.1:9"


class Admin(HTTPServer):
    answer: tuple[int, bytes] = (200, b"{}")


class Handler(BaseHTTPRequestHandler):
    server: Admin

    def do_GET(self) -> None:
        status, body = self.server.answer if self.path == "/audit" else (404, b"{}")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def admin() -> Iterator[Admin]:
    server = Admin(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join(60)
    server.server_close()


def address(admin: Admin) -> str:
    return f"127.0.0.1:{admin.server_port}"


def put_status(
    instance: Instance, name: str, state: JobState, pid: int = 7, starts: int = 1
) -> None:
    status = JobStatus(name, state, pid, starts)
    write_private(instance.folder / f"{name}.status", json.dumps(asdict(status)))


def announce(
    instance: Instance, worker_id: str, where: str = CLOSED, admin: str = CLOSED, pid: int = 7
) -> None:
    role: Role = "prefill" if worker_id.startswith("prefill") else "decode"
    record = WorkerRecord(worker_id, "b" * 32, role, where, admin, "tiny", pid)
    DirectoryRegistry(instance.folder / "registry").announce(record)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the jobs whose supervisor lives."""
    names: set[str] = set()
    monkeypatch.setattr(process_list, "is_locked", lambda path: path.stem in names)
    return names


def test_a_worker_starts_until_it_has_announced_itself(instance: Instance, kept: set[str]) -> None:
    kept.update({"decode-0", "router"})
    put_status(instance, "decode-0", "running", pid=41, starts=2)
    put_status(instance, "router", "running")
    assert [(row.name, row.state) for row in running()] == [
        ("decode-0", "starting"),
        ("router", "running"),  # a router does not announce itself
    ]
    announce(instance, "decode-0", where="127.0.0.1:4000", pid=41)
    (worker, _) = running()
    assert (worker.state, worker.pid, worker.starts) == ("running", 41, 2)
    assert (worker.address, worker.model, worker.instance) == ("127.0.0.1:4000", "tiny", "test")


def test_a_killed_worker_starts_despite_its_old_announcement(
    instance: Instance, kept: set[str], admin: Admin
) -> None:
    """It was shown as running, at the address of a dead process, until that had faded."""
    kept.add("decode-0")
    announce(instance, "decode-0", where="127.0.0.1:4000", admin=address(admin), pid=41)
    put_status(instance, "decode-0", "running", pid=42, starts=2)
    (worker,) = running()
    assert (worker.state, worker.pid, worker.address) == ("starting", 42, "")


def test_a_hung_registry_keeps_no_job_from_the_table(
    instance: Instance,
    kept: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept.update({"decode-0", "router"})
    put_status(instance, "decode-0", "running", pid=41)
    put_status(instance, "router", "running")
    reader, writer = os.pipe()
    monkeypatch.setattr(DirectoryRegistry, "workers", lambda _: os.read(reader, 1))
    monkeypatch.setattr(registry_client.answer_within, "__defaults__", (0.05,))
    assert [row.name for row in running()] == ["decode-0", "router"]
    assert "registry cannot be read, so no workers are shown: no answer" in capsys.readouterr().err
    os.close(writer)


@pytest.mark.parametrize(
    ("state", "seen"),
    [("running", "lost"), ("waiting", "lost"), ("failed", "failed"), ("stopped", "stopped")],
)
def test_a_job_without_supervisor_is_lost_unless_given_up(
    instance: Instance, kept: set[str], state: JobState, seen: str
) -> None:
    put_status(instance, "prefill-0", state)
    announce(instance, "prefill-0")
    assert [row.state for row in running()] == [seen]


def test_a_row_has_the_last_end_and_the_log(
    instance: Instance, kept: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    kept.add("decode-0")
    status = JobStatus("decode-0", "waiting", 7, 3, ended="signal 9", message="out of memory")
    write_private(instance.folder / "decode-0.status", json.dumps(asdict(status)))
    assert show(as_json=False) == 0
    assert "signal 9" in capsys.readouterr().out
    assert show(as_json=True) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["ended"], row["message"]) == ("signal 9", "out of memory")
    assert row["log"] == str(instance.folder / "decode-0.log")


def test_a_worker_between_two_starts_waits(instance: Instance, kept: set[str]) -> None:
    kept.add("decode-0")
    put_status(instance, "decode-0", "waiting")
    assert [row.state for row in running()] == ["waiting"]


def test_the_routers_address_comes_from_its_file(instance: Instance, kept: set[str]) -> None:
    kept.add("router")
    put_status(instance, "router", "running")
    assert [row.address for row in running()] == [""]
    (instance.folder / "router.address").write_text("127.0.0.1:8000\n")
    (instance.folder / "router.admin_address").write_text("127.0.0.1:9402\n")
    assert [row.address for row in running()] == ["127.0.0.1:8000"]
    (row,) = running()
    assert row.admin == "127.0.0.1:9402" and 9402 in process_list.ports_in_use()


def test_a_job_that_never_started_has_no_row(instance: Instance) -> None:
    (instance.folder / "decode-0.json").write_text("{}")
    announce(instance, "decode-0")
    assert running() == []


def test_looking_changes_nothing(instance: Instance) -> None:
    (instance.folder / "registry").rmdir()
    before = sorted(instance.folder.iterdir())
    assert running() == []
    assert sorted(instance.folder.iterdir()) == before


def test_a_stray_file_among_the_instances_is_no_instance(instance: Instance) -> None:
    (instance.folder.parent / "notes.txt").write_text("mine")
    (instance.folder.parent / "empty").mkdir()
    assert live_instances() == [instance.folder]


def test_an_audit_is_the_workers_own_object(admin: Admin) -> None:
    admin.answer = (200, b'{"worker_id": "decode-0", "requests": 3}')
    assert fetch_audit(address(admin)) == {"worker_id": "decode-0", "requests": 3}


@pytest.mark.parametrize(
    "answer",
    [
        (500, b'{"error": "the books do not balance"}'),
        (200, b"[1, 2]"),
        (200, b"not json"),
        (200, b"\xff\xfe\x00"),
        (200, b""),
    ],
)
def test_what_is_no_audit_is_shown_as_none(admin: Admin, answer: tuple[int, bytes]) -> None:
    admin.answer = answer
    assert fetch_audit(address(admin)) == {}


def test_a_worker_that_does_not_answer_is_a_row_all_the_same(
    instance: Instance, kept: set[str]
) -> None:
    kept.add("decode-0")
    put_status(instance, "decode-0", "running")
    announce(instance, "decode-0", admin=CLOSED)
    (row,) = running()
    assert (row.state, row.audit) == ("running", {})


def test_a_worker_that_is_silent_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_list, "AUDIT_TIMEOUT_S", 0.05)
    with HTTPServer(("127.0.0.1", 0), Handler) as deaf:  # accepts nothing, the kernel does
        assert fetch_audit(f"127.0.0.1:{deaf.server_port}") == {}


def test_nothing_running_is_said_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(as_json=False) == 1
    assert "baton serve" in capsys.readouterr().out
    assert show(as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == []


def test_json_carries_every_field_of_a_row(
    instance: Instance, kept: set[str], admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.answer = (200, b'{"blocks": {"total": 8, "free": 8, "used": 0}}')
    kept.add("decode-0")
    put_status(instance, "decode-0", "running", pid=41)
    announce(instance, "decode-0", where="127.0.0.1:4000", admin=address(admin), pid=41)
    assert show(as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "instance": "test",
            "name": "decode-0",
            "state": "running",
            "pid": 41,
            "starts": 1,
            "address": "127.0.0.1:4000",
            "admin": address(admin),
            "model": "tiny",
            "audit": {"blocks": {"total": 8, "free": 8, "used": 0}},
            "ended": "",
            "message": "",
            "log": str(instance.folder / "decode-0.log"),
        }
    ]


@pytest.mark.parametrize(
    ("audit", "load"),
    [
        (
            b'{"worker_id": "decode-0", "boot_id": "ff", "role": "decode", "requests": 0,'
            b' "running": 0, "waiting": 0, "step_s": null, "draining": false,'
            b' "blocks": {"total": 8, "free": 2, "cached": 6, "used": 0}}',
            "decode, KV 0 %",
        ),
        (
            b'{"role": "prefill", "running": 3, "waiting": 1, "draining": true,'
            b' "blocks": {"total": 8, "free": 2, "cached": 2, "used": 3, "leased": 1}}',
            "prefill, draining, 3 running, 1 waiting, KV 50 %",
        ),
        (b'{"worker_id": "decode-0", "role": "changing"}', "changing"),
        (b"not json", "[fd00::1]:4000"),  # no load: the address is the last
    ],
)
def test_the_table_has_a_line_per_row_and_literal_brackets(
    instance: Instance,
    kept: set[str],
    admin: Admin,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    audit: bytes,
    load: str,
) -> None:
    """In a pipe: rich takes 80 columns there, and figures were cut off."""
    monkeypatch.delenv("COLUMNS", raising=False)
    admin.answer = (200, audit)
    kept.add("decode-0")
    put_status(instance, "decode-0", "running", pid=41)
    announce(instance, "decode-0", where="[fd00::1]:4000", admin=address(admin), pid=41)
    assert show(as_json=False) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert line.split()[:6] == ["test", "decode-0", "running", "41", "1", "[fd00::1]:4000"]
    assert line.rstrip().endswith(f" {load}")


def test_a_degraded_peer_is_named_while_its_boot_lives(
    instance: Instance,
    kept: set[str],
    admin: Admin,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    kept.update({"decode-0", "prefill-0"})
    for name in ("decode-0", "prefill-0"):
        put_status(instance, name, "running")
    announce(instance, "prefill-0")
    announce(instance, "decode-0", admin=address(admin))
    slow = {"worker_id": "prefill-0", "boot_id": "b" * 32, "gb_per_s": 0.012}
    ended = {"worker_id": "prefill-1", "boot_id": "c" * 32, "gb_per_s": 0.001}
    audit = {"role": "decode", "degraded_peers": [slow, ended]}
    admin.answer = (200, json.dumps(audit).encode())
    assert show(as_json=False) == 0
    text = capsys.readouterr().out
    assert "DEGRADED from prefill-0: 0.012 GB/s" in text and "prefill-1" not in text
    assert show(as_json=True) == 0
    (decode, _) = json.loads(capsys.readouterr().out)
    assert decode["audit"]["degraded_peers"] == [slow]
