"""What the role controller reads of workers, and the orders that it gives, over a real port."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest
from structlog.testing import capture_logs

from baton.deploy.cli.main import main
from baton.deploy.control.controller_process import service_goals
from baton.deploy.control.fleet_reports import FleetReports, sample_of
from baton.deploy.control.orders import Cluster, cluster_at, order_leave, order_role
from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.deploy.host.instance import Instance
from baton.deploy.nodes.fleet_process import drain_rest
from baton.planner.control import order_rules
from baton.proto import control_pb2
from baton.runtime.cluster_config import RegistryConfig
from baton.runtime.errors import ConfigError, Unavailable
from baton.runtime.grpc_links import open_channel
from baton.runtime.registry import DirectoryRegistry, Role, WorkerRecord
from baton.runtime.settings.loading import load
from baton.runtime.tls import Tls
from tests.support.control_server import ControlServer, served_control
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness

UNUSED = "127.0.0.1:9"  # where no process listens
TOKEN = "the instance's secret"  # as the control port has it
SECRETS = ClusterSecrets((TOKEN,), TOKEN)
WORK = {
    "requests": 12,
    "ended_requests": 10,
    "ended_output_tokens": 900,
    "prompt_tokens": 40,
    "output_tokens": 1000,
    "busy_s": 3.5,
    "steps": 250,
    "queued_tokens": 64,
    "block_tokens": 16,
}


@pytest.fixture
def worker(instance: Instance) -> Iterator[ControlServer]:
    with served_control(instance.folder / "tls") as server:
        audit = json.loads(server.status.audit)
        server.status.audit = json.dumps(audit | {"work": WORK}).encode()
        yield server


@pytest.fixture
def cluster(instance: Instance, worker: ControlServer) -> Cluster:
    announce(instance, "decode-0", worker.address)
    location = RegistryConfig(location=str(instance.folder / "registry"))
    return cluster_at(location, SECRETS, worker.security("client"))


@pytest.fixture
async def reports(cluster: Cluster) -> AsyncIterator[FleetReports]:
    made = FleetReports(cluster, time.monotonic)
    yield made
    await made.close()


def announce(
    instance: Instance, name: str, address: str, *, boot: str = "b", role: Role = "decode"
) -> None:
    registry = DirectoryRegistry(instance.folder / "registry", tokens=(TOKEN,))
    registry.announce(WorkerRecord(name, boot * 32, role, address, address, "tiny", 7))


async def test_workers_are_found_where_they_are_registered(
    instance: Instance, reports: FleetReports, worker: ControlServer
) -> None:
    """By that address a controller knows the pod of a worker."""
    announce(instance, "prefill-0", "[fd00::7]:9000", boot="c", role="prefill")
    assert reports.hosts() == {}
    await reports.read()
    host = worker.address.rpartition(":")[0]
    assert reports.hosts() == {"decode-0": host, "prefill-0": "fd00::7"}


async def test_a_worker_reports_its_counters_and_queues(reports: FleetReports) -> None:
    sample = await reports.read()
    (found,) = sample.workers
    assert (found.worker_id, found.boot_id, found.role) == ("decode-0", "b" * 32, "decode")
    assert (found.state, found.running, found.waiting) == ("ready", 2, 1)
    assert (found.kv_used_tokens, found.kv_tokens) == (10 * 16, 64 * 16)
    assert (found.busy_s, found.steps, found.queued_tokens) == (3.5, 250, 64)
    assert (found.requests, found.ended_requests, found.ended_output_tokens) == (12, 10, 900)
    assert (found.prompt_tokens, found.output_tokens) == (40, 1000)
    assert time.monotonic() - sample.at_s < 5


async def test_readings_share_a_connection(reports: FleetReports, worker: ControlServer) -> None:
    for _ in range(3):
        assert (await reports.read()).workers[0].state == "ready"


async def test_a_lost_worker_is_called_by_a_renewed_certificate(
    instance: Instance, reports: FleetReports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A channel keeps the certificate that it was opened with, so it is not opened again itself."""
    opened: list[str] = []

    def noted(address: str, tls: Tls) -> grpc.aio.Channel:
        opened.append(address)
        return open_channel(address, tls)

    monkeypatch.setattr("baton.deploy.control.fleet_reports.open_channel", noted)
    announce(instance, "decode-0", UNUSED)
    for _ in range(2):
        (found,) = (await reports.read()).workers
        assert found.state == "unreachable"
    assert opened == [UNUSED, UNUSED]


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({"draining": True}, "draining"),
        ({"work": None}, "no counters"),
        ({"work": WORK | {"step_limits": {"of a later version": 1}}}, "no counters"),
        ({"work": {"requests": 12}}, "no counters"),
        ({"blocks": None}, "no counters"),
    ],
)
def test_states_that_a_worker_reports(change: JsonObject, state: str) -> None:
    blocks = {"total": 64, "used": 10}
    audit = {"blocks": blocks, "draining": False, "running": 2, "waiting": 1, "work": WORK}
    audit |= change
    if audit["work"] is None:
        del audit["work"]  # a worker of an older version
    record = WorkerRecord("d", "b" * 32, "decode", "h:1", "h:2", "tiny", 7)
    answer = control_pb2.StatusReply(audit=json.dumps(audit).encode())
    assert sample_of(record, answer).state == state
    answer.not_ready_reason = "it hangs"
    assert sample_of(record, answer).state in ("not ready", state)


async def test_a_worker_without_an_answer_is_unreachable(
    reports: FleetReports, instance: Instance
) -> None:
    announce(instance, "decode-1", "127.0.0.1:9", boot="c")
    states = {each.worker_id: each.state for each in (await reports.read()).workers}
    assert states == {"decode-0": "ready", "decode-1": "unreachable"}


async def test_an_order_is_accepted_by_the_boot_that_was_read(
    reports: FleetReports, instance: Instance, worker: ControlServer
) -> None:
    (found,) = (await reports.read()).workers
    announce(instance, "decode-1", worker.address, boot="c")
    await order_role(reports.target(found.boot_id), "prefill", 1)
    assert worker.orders == ["change role to prefill"]


async def test_the_last_worker_of_a_role_gets_no_order(
    reports: FleetReports, instance: Instance, worker: ControlServer
) -> None:
    """By the registry as it is now: another controller may have taken the others since the
    reading."""
    announce(instance, "decode-1", worker.address, boot="c")
    announce(instance, "prefill-0", worker.address, boot="d", role="prefill")
    await reports.read()
    announce(instance, "decode-1", worker.address, boot="f", role="prefill")
    with pytest.raises(Unavailable, match="decode-0 is the last decode worker"):
        await order_role(reports.target("b" * 32), "prefill", 1)
    assert worker.orders == []


async def test_an_order_for_another_boot_is_refused(
    reports: FleetReports, instance: Instance, worker: ControlServer
) -> None:
    """The report is of a boot that has ended since: the next one does nothing."""
    registry = DirectoryRegistry(instance.folder / "registry", tokens=(TOKEN,))
    registry.withdraw("decode-0", "b" * 32)
    announce(instance, "decode-0", worker.address, boot="e")
    announce(instance, "decode-1", worker.address, boot="c")
    await reports.read()
    with pytest.raises(Unavailable, match="refused the order"):
        await order_role(reports.target("e" * 32), "prefill", 1)
    assert worker.orders == []


async def test_a_blocked_worker_holds_no_controller(
    reports: FleetReports,
    instance: Instance,
    worker: ControlServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order_rules, "ORDER_TIMEOUT_S", 0.3 * slowness())
    (found,) = (await reports.read()).workers
    announce(instance, "decode-1", worker.address, boot="c")
    worker.block(2.0 * slowness())
    within = r"has not accepted the order to become a prefill worker within \d+ s; it may"
    with pytest.raises(Unavailable, match=within):
        await order_role(reports.target(found.boot_id), "prefill", 1)


async def test_a_worker_leaves_if_another_one_has_its_role(
    reports: FleetReports, instance: Instance, worker: ControlServer
) -> None:
    announce(instance, "prefill-0", worker.address, boot="c", role="prefill")
    await reports.read()
    with pytest.raises(Unavailable, match="decode-0 is the last decode worker"):
        await order_leave(reports.target("b" * 32))
    assert worker.orders == []
    announce(instance, "decode-1", worker.address, boot="d")
    await order_leave(reports.target("b" * 32))
    assert worker.orders == ["drain"]


async def test_a_blocked_worker_that_should_leave_stays(
    reports: FleetReports,
    instance: Instance,
    worker: ControlServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order_rules, "ORDER_TIMEOUT_S", 0.3 * slowness())
    announce(instance, "decode-1", worker.address, boot="c")
    await reports.read()
    worker.block(2.0 * slowness())
    with pytest.raises(Unavailable, match=r"to drain within \d+ s; it may still accept it"):
        await order_leave(reports.target("b" * 32))


async def test_a_lost_worker_holds_up_no_drain_of_others(
    cluster: Cluster, instance: Instance, worker: ControlServer
) -> None:
    """The end of a fleet drains what is registered on nodes that Ray has lost."""
    announce(instance, "a-lost-one", "127.0.0.1:9", boot="a")  # nothing listens there
    announce(instance, "decode-1", worker.address, boot="c")  # of another fleet
    with capture_logs() as logs:
        await drain_rest(cluster, {"a-lost-one", "decode-0"})
    assert worker.orders == ["drain"]
    (failed,) = [each for each in logs if each["event"] == "worker not drained"]
    assert failed["worker"] == "a-lost-one" and "does not answer" in failed["reason"]


def test_an_objective_is_needed() -> None:
    with pytest.raises(ConfigError, match="slo.ttft_s and slo.itl_s are 0"):
        service_goals(load(None, {}, {}))
    goals = service_goals(load(None, {}, {"slo.itl_s": "0.05"}))
    assert goals.itl_s == 0.05 and goals.ttft_s == float("inf")


def test_the_command_names_the_instances_that_it_could_mean(
    capsys: pytest.CaptureFixture[str], runtime_folder: Path
) -> None:
    assert main(["controller"]) == 78
    assert (
        "give --instance or --registry; these instances run here: none" in capsys.readouterr().err
    )
