"""`baton drain` and `baton role`: a worker is found, ordered with a proof, and awaited."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from baton.deploy.cli import orders
from baton.deploy.cli.orders import change_role, cluster_at, drain, find, live_clusters
from baton.deploy.host.instance import TOKEN_KEY, Instance
from baton.deploy.processes.admin import ANSWER_S, TAKE_S, TO_BE_TAKEN
from baton.deploy.processes.order_proof import order_proof
from baton.runtime.errors import ConfigError, Unavailable
from baton.runtime.registry import DirectoryRegistry, Role, WorkerRecord

TOKEN = "the instance's secret"
NOBODY = "127.0.0.1:9"


@dataclass
class Admin:
    """An admin port that writes down its orders, and lets its worker go on the `accepted` one."""

    address: str = ""
    status: int = 202
    body: bytes = b"taken\n"
    holds_s: float = 0.0  # before it answers
    heard: list[tuple[str, str]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    accepted: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def admin() -> Iterator[Admin]:
    made = Admin()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.heard.append((self.path, self.headers["Authorization"]))
            made.heads.append(self.headers.as_string())
            time.sleep(made.holds_s)
            made.accepted.set()
            with suppress(OSError):  # who asked has left
                self.send_response(made.status)
                self.end_headers()
                self.wfile.write(made.body)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    made.address = f"127.0.0.1:{server.server_port}"
    yield made
    server.shutdown()
    thread.join(60)
    server.server_close()


def announce(
    instance: Instance, worker_id: str, admin: str = NOBODY, boot: str = "b", role: Role = "decode"
) -> None:
    registry = DirectoryRegistry(instance.folder / "registry", secret=TOKEN)
    registry.announce(WorkerRecord(worker_id, boot * 32, role, NOBODY, admin, "tiny", 7))


@pytest.fixture
def ready(instance: Instance) -> Instance:
    instance.write_environment({TOKEN_KEY: TOKEN})
    return instance


def test_an_order_carries_its_proof_and_not_the_token_and_its_end_is_waited_for(
    ready: Instance, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "LOOK_S", 0.01)
    announce(ready, "decode-0", admin.address)
    announce(ready, "decode-1", admin.address, boot="d")
    said: list[str] = []

    def leave() -> None:
        admin.accepted.wait(60)
        announce(ready, "decode-0", admin.address, boot="c")  # started again meanwhile

    leaving = threading.Thread(target=leave)
    leaving.start()
    drain("decode-0", live_clusters(), said.append)
    leaving.join(60)
    proof = order_proof(TOKEN, "decode-0", "b" * 32, "/drain")
    assert admin.heard == [("/drain", f"Bearer {proof}")]
    assert TOKEN not in admin.heads[0]
    assert said[0] == "decode-0 takes nothing new and finishes what it has"
    assert len(said) == 2 and "has ended" in said[1]


def test_an_order_that_is_not_taken_yet_is_told_so_and_waited_for(
    ready: Instance, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is carried out all the same: it was called refused."""
    monkeypatch.setattr(orders, "LOOK_S", 0.01)
    admin.body = TO_BE_TAKEN
    announce(ready, "decode-0", admin.address)
    announce(ready, "decode-1", admin.address, boot="d")
    said: list[str] = []
    coming = become(ready, admin, "prefill")
    change_role("decode-0", "prefill", live_clusters(), said.append)
    coming.join(60)
    assert "has the order and has not taken it yet" in said[0] and "/readyz" in said[0]
    assert len(said) == 2 and "is a prefill worker now" in said[1]


def test_who_does_not_answer_may_have_the_order(
    ready: Instance, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "ORDER_TIMEOUT_S", 0.05)
    admin.holds_s = 0.3
    announce(ready, "decode-0", admin.address)
    with pytest.raises(Unavailable, match="may take the order all the same"):
        drain("decode-0", live_clusters())


def test_a_client_waits_longer_for_an_answer_than_the_port_takes() -> None:
    assert orders.ORDER_TIMEOUT_S > ANSWER_S + TAKE_S


def test_a_refusal_is_told_with_its_status(ready: Instance, admin: Admin) -> None:
    admin.status, admin.body = 401, b"as the test says"
    announce(ready, "decode-0", admin.address)
    with pytest.raises(Unavailable, match="refused /drain: 401 as the test says"):
        drain("decode-0", live_clusters())


def test_a_worker_that_does_not_answer_is_told(ready: Instance) -> None:
    announce(ready, "decode-0")
    with pytest.raises(Unavailable, match="decode-0 does not answer: .*refused") as told:
        drain("decode-0", live_clusters())
    assert "all the same" not in str(told.value)  # nobody has heard of it


def test_a_worker_that_never_ends_is_told(
    ready: Instance, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "LOOK_S", 0.01)
    monkeypatch.setattr(orders, "END_WITHIN_S", 0.05)
    announce(ready, "decode-0", admin.address)
    with pytest.raises(Unavailable, match="has not ended"):
        drain("decode-0", live_clusters(), lambda line: None)


def test_who_is_not_there_is_told_with_those_who_are(ready: Instance) -> None:
    announce(ready, "decode-0")
    with pytest.raises(ConfigError, match="no worker decode-7 runs here; there are: decode-0"):
        find("decode-7", live_clusters())
    with pytest.raises(ConfigError, match="no instance port-1 runs here; there are: test"):
        live_clusters("port-1")


def test_a_name_in_two_instances_asks_for_the_instance(ready: Instance) -> None:
    other = Instance.claim("port-2")
    other.write_environment({TOKEN_KEY: TOKEN})
    try:
        announce(ready, "decode-0")
        announce(other, "decode-0")
        with pytest.raises(ConfigError, match="--instance"):
            find("decode-0", live_clusters())
        assert find("decode-0", live_clusters("port-2")).cluster.name == "port-2"
    finally:
        other.end()


def become(instance: Instance, admin: Admin, role: Role) -> threading.Thread:
    """The worker comes back as `role` once the order has come."""

    def come_back() -> None:
        admin.accepted.wait(60)
        announce(instance, "decode-0", admin.address, boot="c", role=role)

    thread = threading.Thread(target=come_back)
    thread.start()
    return thread


def test_a_role_is_ordered_and_its_change_waited_for(
    ready: Instance, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "LOOK_S", 0.01)
    announce(ready, "decode-0", admin.address)
    announce(ready, "decode-1", admin.address, boot="d")
    said: list[str] = []
    coming = become(ready, admin, "prefill")
    change_role("decode-0", "prefill", live_clusters(), said.append)
    coming.join(60)
    proof = order_proof(TOKEN, "decode-0", "b" * 32, "/role/prefill")
    assert admin.heard == [("/role/prefill", f"Bearer {proof}")]
    assert "is a prefill worker now" in said[-1]
    change_role("decode-0", "prefill", live_clusters(), said.append)
    assert "already" in said[-1] and len(admin.heard) == 1


def test_a_worker_that_comes_back_as_what_it_was_is_told(
    ready: Instance, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "LOOK_S", 0.01)
    announce(ready, "decode-0", admin.address)
    announce(ready, "decode-1", admin.address, boot="d")
    coming = become(ready, admin, "decode")
    with pytest.raises(Unavailable, match="did not become a prefill worker"):
        change_role("decode-0", "prefill", live_clusters(), lambda line: None)
    coming.join(60)


def test_the_last_decode_worker_stays_one(ready: Instance, admin: Admin) -> None:
    announce(ready, "decode-0", admin.address)
    announce(ready, "prefill-0", admin.address, role="prefill")
    with pytest.raises(ConfigError, match="decode-0 is the only decode worker"):
        change_role("decode-0", "prefill", live_clusters())
    assert admin.heard == []


def test_a_worker_that_was_started_alone_is_found_by_its_registry_and_token(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "LOOK_S", 0.01)
    registry = DirectoryRegistry(tmp_path / "registry", secret=TOKEN)
    record = WorkerRecord("w", "b" * 32, "decode", NOBODY, admin.address, "tiny", 7)
    registry.announce(record)

    def leave() -> None:
        admin.accepted.wait(60)
        registry.withdraw("w", record.boot_id)

    leaving = threading.Thread(target=leave)
    leaving.start()
    drain("w", [cluster_at(tmp_path / "registry", TOKEN)], lambda line: None)
    leaving.join(60)
    assert admin.heard == [("/drain", f"Bearer {order_proof(TOKEN, 'w', 'b' * 32, '/drain')}")]


def test_whoever_announces_without_the_token_is_given_no_order(
    admin: Admin, tmp_path: Path
) -> None:
    folder = tmp_path / "registry"
    record = WorkerRecord("w", "b" * 32, "decode", NOBODY, admin.address, "tiny", 7)
    DirectoryRegistry(folder, secret="another").announce(record)
    with pytest.raises(ConfigError, match="no worker w runs here; there are: none"):
        drain("w", [cluster_at(folder, TOKEN)])
    assert admin.heard == []


def test_a_registry_that_is_not_there_is_named_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no registry .*/nowhere: give the folder"):
        cluster_at(tmp_path / "nowhere", TOKEN)
    assert list(tmp_path.iterdir()) == []
