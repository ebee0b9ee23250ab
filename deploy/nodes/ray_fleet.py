"""The workers of a fleet as actors of Ray: made, found again, asked and ended.

Actors are detached and named by worker id in a namespace of the cluster, so they outlive the driver
and the next one finds them. Each has a detached placement group of its own, with a bundle for each
rank of its worker, all on one node. Ray makes actor and group again on another node when theirs is
lost. Only orders and reports pass through Ray. Its exceptions are translated here, and only here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection, Iterator
from typing import Any

from baton.deploy.nodes.node_choice import Room
from baton.deploy.nodes.node_worker import NodeWorker, WorkerReport
from baton.deploy.nodes.worker_order import WorkerOrder
from baton.runtime import logs
from baton.runtime.errors import BatonError, Unavailable

NAMESPACE = "baton-"  # with the cluster's name behind it
REMOVED = "REMOVED"  # the state of a group that Ray still lists
ANSWER_S = 2.0  # for the answers of all actors; a later answer is read in a later round


class NodeActor:
    """Keeps one worker on the node that Ray has chosen; runs in an actor process of Ray."""

    def __init__(self, order: WorkerOrder) -> None:
        import ray

        # Ray declares no types for it
        node = ray.util.get_node_ip_address()
        logs.setup(f"{order.worker_id}-actor")
        self._worker: NodeWorker | None = None
        try:
            self._worker = NodeWorker(order, node, os.environ)
        except BatonError as error:  # the node lacks a secret or the model: the driver reports it
            self._failed = WorkerReport(order, node, "failed", message=str(error))
            return
        threading.Thread(target=self._worker.run, daemon=True).start()

    def report(self) -> WorkerReport:
        return self._failed if self._worker is None else self._worker.report()

    def end(self) -> None:
        if self._worker is not None:
            self._worker.end()


class RayFleet:
    """Actors of one cluster, through the module `ray`, which has joined Ray in `namespace_of` the
    cluster. All methods raise Unavailable when Ray fails."""

    def __init__(self, ray: Any, cluster: str) -> None:
        logging.getLogger("ray.actor").addFilter(_is_of_use)
        self._ray = ray
        self._prefix = f"{namespace_of(cluster)}/"  # of groups: Ray lists those of all namespaces
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}  # a question to each that has not answered yet
        self._swept: tuple[frozenset[str], frozenset[str]] | None = None  # actors, and what to keep

    def names(self) -> set[str]:
        """Return the worker ids of all actors that live, start or wait for a node."""
        with self._translated():
            found = set(self._ray.util.list_named_actors())
            for name in found - set(self._actors):
                with contextlib.suppress(ValueError):  # it has ended since
                    self._actors[name] = self._ray.get_actor(name)
        for name in set(self._actors) - found:
            self._forget(name)
        return found

    def nodes(self) -> int:
        """Return how many nodes of the cluster live."""
        with self._translated():
            return sum(node["Alive"] for node in self._ray.nodes())

    def rooms(self) -> dict[str, Room]:
        """Return what each living node has in all, by address."""
        with self._translated():
            nodes = self._ray.nodes()
        return {node["NodeManagerAddress"]: node["Resources"] for node in nodes if node["Alive"]}

    def make(self, order: WorkerOrder, host: str | None) -> None:
        """Make the worker's actor in its group, on the node at this address if it lives and has
        room, else where Ray finds room."""
        with self._translated():
            strategies = self._ray.util.scheduling_strategies
            options = {
                "name": order.worker_id,
                "get_if_exists": True,
                "lifetime": "detached",
                "max_restarts": -1,
                "num_cpus": order.cpus / order.ranks,
                "num_gpus": order.gpus,
                "resources": order.resources(),
                "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                    self._group_for(order, host), placement_group_bundle_index=0
                ),
            }
            actor = self._ray.remote(NodeActor).options(**options)
            self._actors[order.worker_id] = actor.remote(order)

    def _group_for(self, order: WorkerOrder, host: str | None) -> Any:
        """Return the worker's group: one that an earlier actor has left, where the worker may run
        still, or a new one."""
        group = self._group_of(order.worker_id)
        if group is not None:
            if group.bundle_specs == order.bundles():
                return group
            self._ray.util.remove_placement_group(group)
        name = f"{self._prefix}{order.worker_id}"
        try:
            return self._ray.util.placement_group(
                order.bundles(),
                strategy="STRICT_PACK",
                name=name,
                lifetime="detached",
                _soft_target_node_id=self._node_id(host),  # there is no public name for it
            )
        except ValueError as error:  # another driver has made it just now
            raise Unavailable(f"Ray makes no placement group {name}: {error}") from error

    def _group_of(self, name: str) -> Any:
        """Return the group of a worker; None if it has none."""
        try:
            return self._ray.util.get_placement_group(f"{self._prefix}{name}")
        except ValueError:  # Ray's word for that
            return None

    def _node_id(self, host: str | None) -> str | None:
        """Return the id of the living node at this address; None if there is none."""
        for node in self._ray.nodes() if host is not None else ():
            if node["Alive"] and node["NodeManagerAddress"] == host:
                return str(node["NodeID"])
        return None

    def ask(self) -> dict[str, WorkerReport]:
        """Return the reports of those that answer in ANSWER_S."""
        with self._translated():
            for name, actor in self._actors.items():
                if name not in self._asked:
                    self._asked[name] = actor.report.remote()
            questions = list(self._asked.values())
            if not questions:
                return {}
            done, _ = self._ray.wait(questions, num_returns=len(questions), timeout=ANSWER_S)
            answered = [name for name, question in self._asked.items() if question in done]
            found = {}
            for name in answered:
                question = self._asked.pop(name)
                with contextlib.suppress(self._ray.exceptions.RayError):  # its node is lost
                    found[name] = self._ray.get(question)
            return found

    def end(self, name: str) -> None:
        """Let the worker drain and end. Repeating it does no harm. An actor that has ended since
        `names` is left alone, here and by `remove`."""
        if name in self._actors:
            with self._translated():
                self._actors[name].end.remote()

    def remove(self, name: str) -> None:
        """Remove an actor whose worker has ended, or which has no node, and its group."""
        with self._translated():
            if name in self._actors:
                self._ray.kill(self._actors[name], no_restart=True)
                self._forget(name)
            self._remove_group(name)

    def sweep(self, kept: Collection[str]) -> None:
        """Remove groups that have lost their actor, but those of `kept`, whose actors are made
        again there. So a driver that was killed leaves none for ever. Does nothing while the
        actors and `kept` stay as they were: Ray lists all groups that ever were."""
        state = frozenset(self._actors), frozenset(kept)
        if state == self._swept:
            return
        with self._translated():
            for group in self._ray.util.placement_group_table().values():
                name = str(group["name"])
                worker = name.removeprefix(self._prefix)
                mine = name != worker and group["state"] != REMOVED
                if mine and worker not in self._actors and worker not in kept:
                    self._remove_group(worker)
        self._swept = state

    def _remove_group(self, name: str) -> None:
        group = self._group_of(name)
        if group is not None:
            self._ray.util.remove_placement_group(group)

    def _forget(self, name: str) -> None:
        self._actors.pop(name, None)
        self._asked.pop(name, None)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (self._ray.exceptions.RayError, ConnectionError, TimeoutError) as error:
            raise Unavailable(f"Ray does not answer: {' '.join(str(error).split())}") from error


def _is_of_use(record: logging.LogRecord) -> bool:
    """Drop Ray's warning that an actor ends when its group is removed: here it is meant to."""
    return "restartable detached actor with a placement group" not in record.getMessage()


def namespace_of(cluster: str) -> str:
    return f"{NAMESPACE}{cluster}"
