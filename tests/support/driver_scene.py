"""The driver of a fleet with scripted actors, on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from baton.deploy.nodes.fleet_driver import FleetDriver
from baton.deploy.nodes.node_worker import WorkerReport
from baton.deploy.nodes.worker_order import WorkerOrder
from baton.runtime.registry import Role
from tests.support.scripted_actors import ScriptedActors


def order(name: str, blocks: str = "9") -> WorkerOrder:
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    return WorkerOrder(name, role, "baton", "", (("pool.blocks", blocks),), 60.0)


def changed_report(report: WorkerReport, **fields: Any) -> WorkerReport:
    return replace(report, **fields)


class DriverScene:
    """A driver on a clock that its pauses and turns move."""

    def __init__(self, *orders: WorkerOrder, hosts: Mapping[str, str] | None = None) -> None:
        self.now = 0.0
        self.readings = 0  # of the registry
        self.fleet = ScriptedActors()
        self.hosts: Mapping[str, str] | None = hosts or {}
        self.on_pause: Callable[[float], None] = self.pass_by
        self.driver = self.new_driver(*orders)

    def new_driver(self, *orders: WorkerOrder, pack: bool = False) -> FleetDriver:
        return FleetDriver(self.fleet, orders, self.read_hosts, self.time, self.pause, pack)

    def time(self) -> float:
        return self.now

    def read_hosts(self) -> Mapping[str, str] | None:
        self.readings += 1
        return self.hosts

    def pause(self, seconds: float) -> None:
        self.on_pause(seconds)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def turns(self, driver: FleetDriver, count: int = 1) -> None:
        for _ in range(count):
            driver.turn()
            self.now += 1.0
