"""`baton drain` and `baton role`: a worker is found, gets its order, and its end is awaited."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.deploy.control import orders
from baton.deploy.control.orders import change_role, cluster_at, drain, find, live_clusters
from baton.deploy.host.authority import Authority
from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.deploy.host.instance import TOKEN_KEY, Instance
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.errors import ConfigError, Unavailable
from baton.runtime.registry import DirectoryRegistry, Role, WorkerRecord
from tests.support.control_server import ControlServer, served_control
from tests.support.machine_speed import slowness

TOKEN = "the instance's secret"  # as the control port has it
SECRETS = ClusterSecrets((TOKEN,), TOKEN)
CLOSED = "127.0.0.1:9"  # nothing listens there


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "POLL_S", 0.01)


@pytest.fixture
def worker(ready: Instance) -> Iterator[ControlServer]:
    """Has the certificate of an authority of the instance, as its commands have."""
    with served_control(ready.folder / "tls") as server:
        ready.write_client_settings(server.authority.issue("client", None).settings())
        yield server


@pytest.fixture
def ready(instance: Instance) -> Instance:
    instance.write_environment({TOKEN_KEY: TOKEN})
    instance.write_client_settings({"security.tls": "off"})
    return instance


def announce(
    instance: Instance,
    worker_id: str,
    address: str = CLOSED,
    boot: str = "b",
    role: Role = "decode",
) -> None:
    registry = DirectoryRegistry(instance.folder / "registry", tokens=(TOKEN,))
    registry.announce(WorkerRecord(worker_id, boot * 32, role, address, CLOSED, "tiny", 7))


def announce_later(
    instance: Instance, worker: ControlServer, role: Role = "decode"
) -> threading.Thread:
    """Let the worker come back as `role`, under another boot id, once it has accepted an order."""

    def come_back() -> None:
        worker.accepted.wait(60)
        announce(instance, "decode-0", worker.address, boot="c", role=role)

    thread = threading.Thread(target=come_back)
    thread.start()
    return thread


def test_a_cluster_whose_authority_is_missing_is_refused(tmp_path: Path) -> None:
    registry = RegistryConfig(location="rediss://host", authority=str(tmp_path / "no.pem"))
    with pytest.raises(ConfigError, match=r"registry\.authority: .*no\.pem cannot be used"):
        cluster_at(registry, SECRETS, SecurityConfig(tls="off"))


def test_a_drain_is_ordered_and_its_end_awaited(ready: Instance, worker: ControlServer) -> None:
    announce(ready, "decode-0", worker.address)
    announce(ready, "decode-1", worker.address, boot="d")
    said: list[str] = []
    coming = announce_later(ready, worker)
    drain("decode-0", live_clusters(), said.append)
    coming.join(60)
    assert worker.orders == ["drain"]
    assert said[0] == "decode-0 takes nothing new and finishes what it has"
    assert len(said) == 2 and "has ended; its supervisor (`baton serve`, systemd" in said[1]


def test_an_order_is_accepted_once_a_blocked_loop_runs(
    ready: Instance, worker: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not called refused: it is carried out all the same."""
    monkeypatch.setattr(orders, "REPORT_AFTER_S", 0.2)
    announce(ready, "decode-0", worker.address)
    announce(ready, "decode-1", worker.address, boot="d")
    said: list[str] = []
    coming = announce_later(ready, worker, "prefill")
    worker.block(2.0)
    change_role("decode-0", "prefill", live_clusters(), said.append)
    coming.join(60)
    assert "has the order and has not accepted it" in said[0] and "/readyz" in said[0]
    assert worker.orders == ["change role to prefill"]
    assert len(said) == 3 and "is a prefill worker now" in said[2]


def test_a_worker_that_does_not_answer_may_have_the_order(
    ready: Instance, worker: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "END_TIMEOUT_S", 0.5 * slowness())
    announce(ready, "decode-0", worker.address)
    worker.block(2.0 * slowness())
    with pytest.raises(Unavailable, match="may accept the order all the same"):
        drain("decode-0", live_clusters())


def test_a_refusal_is_reported_with_its_reason(ready: Instance, worker: ControlServer) -> None:
    announce(ready, "decode-0", worker.address, boot="e")  # the boot before
    with pytest.raises(Unavailable, match="decode-0 refused the order: the order names boot eeee"):
        drain("decode-0", live_clusters())
    assert worker.orders == []


def test_a_certificate_of_another_authority_is_no_answer(
    ready: Instance, worker: ControlServer, tmp_path: Path
) -> None:
    foreign = Authority(tmp_path / "tls").issue("client", None)
    ready.write_client_settings(foreign.settings())
    announce(ready, "decode-0", worker.address)
    with pytest.raises(Unavailable, match=r"decode-0 does not answer: .*security\.authority"):
        drain("decode-0", live_clusters())
    assert worker.orders == []


def test_a_worker_that_cannot_be_reached_is_reported(ready: Instance) -> None:
    announce(ready, "decode-0")
    with pytest.raises(Unavailable, match="decode-0 does not answer: .*refused") as raised:
        drain("decode-0", live_clusters())
    assert "all the same" not in str(raised.value)  # it was never sent


def test_a_worker_that_never_ends_is_reported(
    ready: Instance, worker: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "END_TIMEOUT_S", 2.0 * slowness())
    announce(ready, "decode-0", worker.address)
    with pytest.raises(Unavailable, match="has not ended"):
        drain("decode-0", live_clusters(), lambda line: None)


def test_an_unknown_worker_is_reported_with_the_known_ones(ready: Instance) -> None:
    announce(ready, "decode-0")
    with pytest.raises(ConfigError, match="no worker decode-7 runs here; there are: decode-0"):
        find("decode-7", live_clusters())
    with pytest.raises(ConfigError, match="no instance port-1 runs here; there are: test"):
        live_clusters("port-1")


def test_a_name_in_two_instances_asks_for_the_instance(ready: Instance) -> None:
    other = Instance.claim("port-2")
    assert other is not None
    other.write_environment({TOKEN_KEY: TOKEN})
    other.write_client_settings({"security.tls": "off"})
    try:
        announce(ready, "decode-0")
        announce(other, "decode-0")
        with pytest.raises(ConfigError, match="--instance"):
            find("decode-0", live_clusters())
        assert find("decode-0", live_clusters("port-2")).cluster.name == "port-2"
    finally:
        other.end()


def test_an_instance_that_has_only_begun_has_no_workers(ready: Instance) -> None:
    (ready.folder / "client.json").unlink()
    assert live_clusters() == []


def test_a_role_is_ordered_and_its_change_awaited(ready: Instance, worker: ControlServer) -> None:
    announce(ready, "decode-0", worker.address)
    announce(ready, "decode-1", worker.address, boot="d")
    said: list[str] = []
    coming = announce_later(ready, worker, "prefill")
    change_role("decode-0", "prefill", live_clusters(), said.append)
    coming.join(60)
    assert worker.orders == ["change role to prefill"]
    assert "is a prefill worker now" in said[-1]
    change_role("decode-0", "prefill", live_clusters(), said.append)
    assert "already" in said[-1] and len(worker.orders) == 1


def test_a_worker_that_comes_back_in_its_old_role_is_reported(
    ready: Instance, worker: ControlServer
) -> None:
    announce(ready, "decode-0", worker.address)
    announce(ready, "decode-1", worker.address, boot="d")
    coming = announce_later(ready, worker, "decode")
    with pytest.raises(Unavailable, match="did not become a prefill worker"):
        change_role("decode-0", "prefill", live_clusters(), lambda line: None)
    coming.join(60)


def test_the_last_decode_worker_keeps_its_role(ready: Instance, worker: ControlServer) -> None:
    announce(ready, "decode-0", worker.address)
    announce(ready, "prefill-0", worker.address, role="prefill")
    with pytest.raises(ConfigError, match="decode-0 is the only decode worker"):
        change_role("decode-0", "prefill", live_clusters())
    assert worker.orders == []


def test_a_worker_started_alone_is_found_by_its_registry(
    worker: ControlServer, tmp_path: Path
) -> None:
    registry = DirectoryRegistry(tmp_path / "registry", tokens=(TOKEN,))
    record = WorkerRecord("decode-0", "b" * 32, "decode", worker.address, CLOSED, "tiny", 7)
    registry.announce(record)

    def leave() -> None:
        worker.accepted.wait(60)
        registry.withdraw("decode-0", record.boot_id)

    leaving = threading.Thread(target=leave)
    leaving.start()
    security = worker.security("own")
    drain(
        "decode-0",
        [cluster_at(RegistryConfig(location=str(tmp_path / "registry")), SECRETS, security)],
        lambda line: None,
    )
    leaving.join(60)
    assert worker.orders == ["drain"]


def test_a_record_without_the_clusters_token_gets_no_order(
    worker: ControlServer, tmp_path: Path
) -> None:
    folder = tmp_path / "registry"
    record = WorkerRecord("decode-0", "b" * 32, "decode", worker.address, CLOSED, "tiny", 7)
    DirectoryRegistry(folder, tokens=("another",)).announce(record)
    security = worker.security("own")
    with pytest.raises(ConfigError, match="no worker decode-0 runs here; there are: none"):
        drain("decode-0", [cluster_at(RegistryConfig(location=str(folder)), SECRETS, security)])
    assert worker.orders == []


def test_a_missing_registry_is_named_and_not_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no registry .*/nowhere: give the folder"):
        cluster_at(
            RegistryConfig(location=str(tmp_path / "nowhere")), SECRETS, SecurityConfig(tls="off")
        )
    assert list(tmp_path.iterdir()) == []
