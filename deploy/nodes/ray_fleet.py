"""The workers of a fleet as actors of Ray: made, found again, asked and ended.

Actors are detached and named by worker id in a namespace of the cluster, so they outlive the driver
and the next one finds them. Ray makes an actor again on another node when its node is lost. Only
orders and reports pass through Ray. Its exceptions are translated here, and only here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from baton.deploy.nodes.node_choice import NodeChoice, Room
from baton.deploy.nodes.node_worker import NodeWorker, WorkerReport
from baton.deploy.nodes.worker_order import WorkerOrder
from baton.runtime import logs
from baton.runtime.errors import BatonError, Unavailable

NAMESPACE = "baton-"  # with the cluster's name behind it
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
    cluster. `pack`: few nodes rather than many. All methods raise Unavailable when Ray fails."""

    def __init__(self, ray: Any, pack: bool) -> None:
        self._ray = ray
        self._pack = pack
        self._strategy = "DEFAULT" if pack else "SPREAD"
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}  # a question to each that has not answered yet

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
        """Return what each living node has in all, by address; nothing if nodes are to be packed,
        which Ray does by itself."""
        if self._pack:
            return {}
        with self._translated():
            nodes = self._ray.nodes()
        return {node["NodeManagerAddress"]: node["Resources"] for node in nodes if node["Alive"]}

    def make(self, order: WorkerOrder, node: NodeChoice) -> None:
        """Make the worker's actor, on this node if it lives; anywhere if none is chosen."""
        with self._translated():
            options = {
                "name": order.worker_id,
                "get_if_exists": True,
                "lifetime": "detached",
                "max_restarts": -1,
                "num_cpus": order.cpus,
                "num_gpus": order.gpus,
                "resources": order.resources(),
                "scheduling_strategy": self._near(node) or self._strategy,
            }
            actor = self._ray.remote(NodeActor).options(**options)
            self._actors[order.worker_id] = actor.remote(order)

    def _near(self, choice: NodeChoice) -> Any:
        """Return the strategy for a chosen node; None if there is no such node."""
        strategies = self._ray.util.scheduling_strategies
        for node in self._ray.nodes() if choice.host else ():
            if node["Alive"] and node["NodeManagerAddress"] == choice.host:
                return strategies.NodeAffinitySchedulingStrategy(
                    node["NodeID"],
                    soft=True,
                    _spill_on_unavailable=not choice.waits,  # there is no public name for it
                )
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
        """Remove an actor whose worker has ended, or which has no node."""
        if name in self._actors:
            with self._translated():
                self._ray.kill(self._actors[name], no_restart=True)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._actors.pop(name, None)
        self._asked.pop(name, None)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (self._ray.exceptions.RayError, ConnectionError, TimeoutError) as error:
            raise Unavailable(f"Ray does not answer: {' '.join(str(error).split())}") from error


def namespace_of(cluster: str) -> str:
    return f"{NAMESPACE}{cluster}"
