"""What an actor does on its node, with real supervisors and children; the registry is in memory."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

from baton.deploy.cli import main
from baton.deploy.control.orders import Target
from baton.deploy.host.instance import is_locked, read_status, signal_supervisor
from baton.deploy.host.job_log import END_LINES
from baton.deploy.nodes import node_worker
from baton.deploy.nodes.node_folder import Tending, leave, node_folder
from baton.deploy.nodes.node_worker import NodeWorker, WorkerReport
from baton.deploy.nodes.worker_order import WorkerOrder
from baton.runtime.errors import ConfigError, Unavailable
from baton.runtime.registry import MemoryRegistry, WorkerRecord
from baton.runtime.registry_client import InlineRegistry
from tests.support.supervised_jobs import IDLE
from tests.support.waiting import wait_until

NODE = "10.0.0.1"
NAME = "decode-0"
ENVIRON = {"BATON_TOKEN": "secret"}
ORDER = WorkerOrder(
    NAME, "decode", "baton", "/models/m", (("registry.location", "redis://db"),), 10.0
)
WAIT_S = 60.0


class Node:
    """One node, its actor and the cluster's registry. The worker is a child that sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code = IDLE
        self.registry = MemoryRegistry()
        self.drained: list[str] = []
        self.drain_failure: Exception | None = None
        self.folder = node_folder("baton", ENVIRON)
        monkeypatch.setattr(node_worker, "worker_command", self._command)
        monkeypatch.setattr(node_worker, "order_drain", self._drain)
        self.tending = Tending(self.folder, NAME)
        self.worker = NodeWorker(ORDER, NODE, ENVIRON)

    def _command(self, order: WorkerOrder, *_: object) -> tuple[str, ...]:
        return (
            sys.executable,
            "-S",
            "-c",
            self.code,
            *(text for pair in order.settings for text in pair),
        )

    async def _drain(self, target: Target) -> None:
        if self.drain_failure is not None:
            raise self.drain_failure
        self.drained.append(target.record.boot_id)

    def turn(self) -> WorkerReport:
        asyncio.run(self.worker.turn(InlineRegistry(self.registry), self.tending))
        return self.worker.report()

    def until(self, happened: Callable[[WorkerReport], bool]) -> WorkerReport:
        wait_until(lambda: happened(self.turn()), WAIT_S, show=self.worker.report)
        return self.worker.report()

    def running(self) -> int:
        """Wait until the worker runs; its pid."""
        self.until(lambda report: report.state == "running")
        status = read_status(self.folder, NAME)
        assert status is not None
        return status.pid

    def announce(self, pid: int, boot: str = "a", host: str = NODE, memory: str = "") -> str:
        boot_id = boot * 32
        address = f"{host}:9000"
        record = WorkerRecord(NAME, boot_id, "decode", address, address, "m", pid)
        self.registry.announce(replace(record, memory=memory))
        return boot_id

    def lose_actor(self) -> None:
        """The actor's process dies; another one is made on this node."""
        self.tending.close()
        self.tending = Tending(self.folder, NAME)
        self.worker = NodeWorker(ORDER, NODE, ENVIRON)

    def kept(self) -> bool:
        return is_locked(self.folder / f"{NAME}.lock")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(monkeypatch)
    yield made
    made.tending.close()

    def ended() -> bool:
        if made.kept():
            signal_supervisor(made.folder, NAME, signal.SIGTERM)
        return not made.kept()

    wait_until(ended, WAIT_S, every_s=0.05)


def test_a_worker_is_started_and_reported_once_registered(node: Node) -> None:
    pid = node.running()
    assert node.turn().boot_id == ""
    boot_id = node.announce(pid)
    report = node.turn()
    assert (report.boot_id, report.address, report.starts) == (boot_id, f"{NODE}:9000", 1)
    assert (report.node, report.message, report.adopted) == (NODE, "", False)


def test_an_actor_that_is_made_again_adopts_the_running_boot(node: Node) -> None:
    pid = node.running()
    boot_id = node.announce(pid)
    node.lose_actor()
    report = node.turn()
    assert (report.state, report.boot_id, report.starts) == ("running", boot_id, 1)
    assert node.running() == pid and node.turn().adopted
    os.kill(pid, signal.SIGKILL)
    assert not node.until(lambda e: e.starts == 2 and e.state == "running").adopted


def test_a_killed_worker_is_started_again_while_it_is_tended(node: Node) -> None:
    pid = node.running()
    node.turn()
    os.kill(pid, signal.SIGKILL)
    assert node.until(lambda e: e.starts == 2 and e.state == "running")
    assert node.running() != pid


def test_a_killed_worker_stays_down_while_no_actor_tends_it(node: Node) -> None:
    pid = node.running()
    node.tending.close()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not node.kept(), WAIT_S)
    status = read_status(node.folder, NAME)
    assert status is not None and (status.state, status.starts) == ("stopped", 1)
    node.tending = Tending(node.folder, NAME)
    assert node.running() != pid


def test_two_actors_of_one_worker_do_not_tend_it_together(node: Node) -> None:
    node.running()
    second = NodeWorker(ORDER, NODE, ENVIRON)
    theirs = Tending(node.folder, NAME)
    asyncio.run(second.turn(InlineRegistry(node.registry), theirs))
    assert second.report().state == "elsewhere"
    node.tending.close()
    asyncio.run(second.turn(InlineRegistry(node.registry), theirs))
    assert second.report().state == "running"
    theirs.close()
    node.tending = Tending(node.folder, NAME)


def test_a_boot_elsewhere_is_drained_once_this_one_is_registered(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = node.registry.workers
    pid = node.running()
    elsewhere = WorkerRecord(NAME, "b" * 32, "decode", "10.0.0.2:1", "10.0.0.2:2", "m", pid)
    monkeypatch.setattr(node.registry, "workers", lambda: [elsewhere, *records()])
    node.turn()
    assert node.drained == []
    node.announce(pid)
    node.drain_failure = Unavailable("it does not answer")
    assert node.turn().message == ""
    node.drain_failure = None
    node.turn()
    node.turn()
    assert node.drained == ["b" * 32]


def test_the_end_drains_the_worker_here_and_elsewhere(node: Node) -> None:
    node.running()
    node.announce(1, boot="b", host="10.0.0.2")
    node.worker.end()
    node.until(lambda report: report.state == "ended")
    assert not node.kept() and node.drained == ["b" * 32]


def test_a_kept_worker_with_another_command_is_replaced(node: Node) -> None:
    pid = node.running()
    node.code = IDLE + "  # with other settings"
    node.lose_actor()
    node.until(lambda report: report.state == "running" and node.running() != pid)


def fail_once(node: Node) -> None:
    """Let the worker be given up, unless the file beside its lock is there."""
    cured = node.folder / "cured"
    node.code = (
        "import os, signal, sys\n"
        f"if os.path.exists({str(cured)!r}): signal.pause()\n"
        "open(os.environ['BATON_ERROR_FILE'], 'w').write('no model'); sys.exit(78)"
    )
    node.worker = NodeWorker(ORDER, NODE, ENVIRON)
    assert node.until(lambda report: report.state == "failed").message == "no model"
    assert node.turn().state == "failed"
    cured.touch()


def test_a_worker_s_progress_is_reported_until_it_is_registered(node: Node) -> None:
    node.code = (
        "import os, signal; print('reads its weights', flush=True)\n"
        "open(os.environ['BATON_PROGRESS_FILE'], 'w').write('loading weights: 40 %')\n"
        "signal.pause()"
    )
    node.worker = NodeWorker(ORDER, NODE, ENVIRON)
    report = node.until(lambda each: each.progress != "")
    assert (report.state, report.progress) == ("running", "loading weights: 40 %")
    assert report.log.splitlines()[-1] == "reads its weights"
    node.announce(node.running(), memory="2 GB of KV")
    report = node.turn()
    assert (report.progress, report.log, report.memory) == ("", "", "2 GB of KV")


def test_a_crashed_worker_is_reported_with_its_log(node: Node) -> None:
    node.code = "raise ValueError('a bug')"
    node.worker = NodeWorker(ORDER, NODE, ENVIRON)
    report = node.until(lambda each: each.state == "waiting" and each.restarts > 0)
    assert report.message == "its process ended (exit code 1)"
    assert report.log.splitlines()[-1] == "ValueError: a bug"


def test_a_report_has_the_last_lines_of_a_log_alone(node: Node) -> None:
    lines = [f"line {number}" for number in range(END_LINES + 10)]
    node.code = f"import signal; print('\\n'.join({lines}), flush=True); signal.pause()"
    node.worker = NodeWorker(ORDER, NODE, ENVIRON)
    report = node.until(lambda each: lines[-1] in each.log)
    assert report.log.splitlines() == lines[-END_LINES:]


def test_restarts_are_those_that_this_actor_has_seen(node: Node) -> None:
    pid = node.running()
    os.kill(pid, signal.SIGKILL)
    assert node.until(lambda e: e.starts == 2 and e.state == "running").restarts == 1
    node.lose_actor()
    assert node.turn().restarts == 0


def test_another_actor_tries_at_once_what_one_before_gave_up(node: Node) -> None:
    fail_once(node)
    node.lose_actor()
    report = node.until(lambda each: each.state == "running")
    assert (report.message, report.restarts) == ("", 0)


def test_a_report_of_an_earlier_version_is_read() -> None:
    report = WorkerReport(ORDER, NODE, "running", 1, "a", "b", "c", True, 1, "d", "e", "f")
    assert copy.copy(report) == report
    earlier = WorkerReport.__new__(WorkerReport)
    earlier.__setstate__([ORDER, NODE, "running", 1, "a", "b", "c", True])
    assert earlier == WorkerReport(ORDER, NODE, "running", 1, "a", "b", "c", True)
    later = WorkerReport.__new__(WorkerReport)
    later.__setstate__([*(getattr(report, each.name) for each in fields(report)), "unknown"])
    assert later == report


def test_a_worker_that_was_given_up_is_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(node)
    node.turn()
    assert node.turn().state == "failed"
    monkeypatch.setattr(node_worker, "RETRY_S", 0.0)
    assert node.running()


def test_another_command_is_tried_at_once(node: Node) -> None:
    fail_once(node)
    node.code = IDLE
    node.worker = NodeWorker(ORDER, NODE, ENVIRON)
    assert node.running()


def test_a_node_that_leaves_drains_its_worker_and_starts_none(node: Node) -> None:
    node.running()
    assert leave("baton", ENVIRON, time.monotonic() + WAIT_S)
    for _ in range(3):
        assert node.turn().state == "leaving"
    assert not node.kept()
    (node.folder / "leaving").write_text("another start of the machine")
    assert node.running()


def test_a_node_starts_its_worker_again_once_it_joins(node: Node) -> None:
    node.running()
    assert leave("baton", ENVIRON, time.monotonic() + WAIT_S)
    node.lose_actor()
    assert node.turn().state == "leaving"
    assert main.main(["release", "join"]) == 0
    assert node.running()
    assert main.main(["release", "join"]) == 0  # joining twice does no harm
    assert node.turn().state == "running"


def test_a_node_without_workers_leaves_at_once() -> None:
    assert main.main(["release", "leave", "--within", "5"]) == 0


def test_a_registry_that_fails_stops_no_worker(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[WorkerRecord]:
        raise OSError("no route")

    monkeypatch.setattr(node.registry, "workers", fail)
    node.turn()
    report = node.until(lambda report: report.state == "running")
    assert "no route" in report.message and node.kept()


def test_a_node_without_the_token_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="BATON_TOKEN is not set"):
        NodeWorker(ORDER, NODE, {})


def test_the_folder_of_a_node_holds_no_secret(node: Node) -> None:
    node.running()
    files = [path for path in Path(node.folder).iterdir() if path.is_file()]
    assert files and not [path for path in files if b"secret" in path.read_bytes()]
