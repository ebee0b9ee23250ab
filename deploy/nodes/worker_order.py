"""An order of `baton fleet` to a node of a Ray cluster: one worker, and the resources it needs.

An order travels through Ray, which stores it, so it holds no secret: token, password and keys come
from the environment and the mounted files of the node. Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from baton.runtime.registry import Role

POD_RESOURCE = "baton-"  # with the group, the role or both behind it: a custom resource of Ray
THREADS = "OMP_NUM_THREADS"  # Ray sets it to the cores of an actor, if the node does not
EMBEDDED = ""  # the model that is part of the installation


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """One worker. `model` is a folder of each node. `settings` are pairs of `section.key` and
    text. `grace_s` is from its SIGTERM to its SIGKILL. Ray reserves `cpus` and `gpus` for it, all
    on one node, where its `ranks` share a pool. `by_role`: it runs only on nodes for workers of
    its role; `group`: only on nodes of that group, in any role unless `by_role`. A driver reads
    orders of other versions: a new field is the last one, with a default."""

    worker_id: str
    role: Role
    cluster: str
    model: str
    settings: tuple[tuple[str, str], ...]
    grace_s: float
    cpus: float = 1.0
    gpus: float = 0.0
    by_role: bool = False
    ranks: int = 1
    group: str = ""

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Unpickle an order. One of an earlier version lacks the last fields."""
        restore_fields(self, state)

    def resources(self) -> dict[str, float]:
        """Return the custom resources that its node must have."""
        parts = [self.group] if self.group else []
        parts += [self.role] if self.by_role else []
        return {POD_RESOURCE + "-".join(parts): 1.0} if parts else {}

    def reserves(self) -> dict[str, float]:
        """Return all that Ray reserves for it, by resource."""
        return {"CPU": self.cpus, "GPU": self.gpus} | self.resources()

    def bundles(self) -> list[dict[str, float]]:
        """Return what Ray reserves for each rank. The first bundle, which the actor uses, has the
        GPUs of all: Ray names GPUs to an actor out of one bundle, and the ranks inherit the names.
        A rank without a core reserves a byte, since Ray takes no empty bundle."""
        rank = {"CPU": self.cpus / self.ranks}
        every = [rank | {"GPU": self.gpus} | self.resources(), *([rank] * (self.ranks - 1))]
        found = [{name: amount for name, amount in each.items() if amount} for each in every]
        return [each or {"memory": 1.0} for each in found]

    def needs(self) -> str:
        """Return what a node must have free, for a message."""
        every = self.reserves().items()
        return ", ".join(f"{name} {amount:g}" for name, amount in every if amount)


def restore_fields(value: Any, state: Sequence[Any]) -> None:
    """Set the fields of a frozen dataclass from a pickled state: those that the state lacks, at its
    end, get their defaults, and values of unknown fields are dropped."""
    every = fields(value)
    values = [*state, *(each.default for each in every[len(state) :])]
    for each, found in zip(every, values, strict=False):
        object.__setattr__(value, each.name, found)


def node_settings(order: WorkerOrder, node: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the worker on a node: those of the order, and the node's address in
    Ray unless the node's environment sets one. Ranks share the cores of all bundles, of which Ray
    counts the actor's alone."""
    settings = dict(order.settings)
    if "BATON_WORKER__HOST" not in environ:
        settings["worker.host"] = node
    elif "BATON_WORKER__ADVERTISE" not in environ:
        settings["worker.advertise"] = node
    given = "worker.threads" in settings or "BATON_WORKER__THREADS" in environ
    counted = max(1, int(order.cpus / order.ranks))
    if order.ranks > 1 and not given and environ.get(THREADS) == str(counted):
        settings["worker.threads"] = str(counted * order.ranks)
    return settings


def worker_command(order: WorkerOrder, model: Path, settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command that runs the worker."""
    identity = ("--role", order.role, "--worker-id", order.worker_id, "--model", str(model))
    flags = (f"--set={name}={value}" for name, value in sorted(settings.items()))
    return (sys.executable, "-P", "-m", "baton.deploy.cli.main", "worker", *identity, *flags)
