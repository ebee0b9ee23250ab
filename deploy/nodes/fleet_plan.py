"""The plan of `baton fleet`: which workers a fleet on a Ray cluster has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from baton.deploy.nodes.worker_order import EMBEDDED, WorkerOrder
from baton.runtime.config import Config
from baton.runtime.errors import ConfigError
from baton.runtime.registry import Role
from baton.runtime.settings.checks import SECRET_SETTINGS
from baton.runtime.shared_registry.registry_location import folder_of, holds_password

OF_ONE_NODE = ("worker.host", "worker.advertise", "worker.port", "worker.admin_port")


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The options of `baton fleet`. `settings` are `section.key`: text, of the command line. `cpus`
    are those of a rank, `gpus` those of a worker. `group` and, with `by_role`, the role are the
    name of the resource that a node must have."""

    config: Config
    settings: Mapping[str, str]
    prefill: int = 1
    decode: int = 1
    model: str = EMBEDDED
    cpus: float = 1.0
    gpus: float = 0.0
    prefill_gpus: float | None = None  # None: `gpus`
    decode_gpus: float | None = None
    by_role: bool = False
    group: str = ""
    grace_s: float = 60.0

    def check(self) -> None:
        """Raise ConfigError naming the option that cannot work."""
        if folder_of(self.config.registry) is not None:
            raise ConfigError(
                f"registry.location is the folder {self.config.registry.location}, which other "
                "nodes do not see: give --registry redis://HOST:PORT"
            )
        if holds_password(self.config.registry.location):
            raise ConfigError(
                "registry.location holds a password, and Ray would store it: set "
                "BATON_REGISTRY__PASSWORD in the environment of each node"
            )
        for name in SECRET_SETTINGS:
            if name in self.settings:
                raise ConfigError(
                    f"{name} is a secret, and Ray would store it: set {_variable(name)} in the "
                    "environment of each node"
                )
        for name in OF_ONE_NODE:
            if name in self.settings:
                raise ConfigError(
                    f"{name} differs from node to node: set {_variable(name)} in the environment "
                    "of each node (default: its address in Ray, a free port)"
                )
        self._check_group()
        self._check_device()

    def _check_group(self) -> None:
        """Refuse a group whose workers of both roles would get the nodes of another fleet's role:
        the resource of `--group code-prefill` is that of `--group code --by-role`."""
        for role in get_args(Role):
            if not self.by_role and f"-{self.group}".endswith(f"-{role}"):
                raise ConfigError(
                    f"--group {self.group} names the resource of the {role} workers of a fleet "
                    "with --by-role: give a name that does not end with a role"
                )

    def _check_device(self) -> None:
        device = self.config.worker.device
        if ":" in device:
            raise ConfigError(
                f"worker.device is {device}, and Ray chooses the GPUs of its actors: give cuda"
            )
        for role in get_args(Role):
            gpus = self._gpus(role)
            if device == "cuda" and not gpus:
                raise ConfigError(
                    f"worker.device is cuda, and {role} workers have --gpus 0: give 1 or more"
                )
            if device == "cpu" and gpus:
                raise ConfigError(
                    f"worker.device is cpu, and {role} workers have --gpus {gpus:g}: give 0"
                )

    def _gpus(self, role: Role) -> float:
        given = self.prefill_gpus if role == "prefill" else self.decode_gpus
        return self.gpus if given is None else given

    def orders(self) -> list[WorkerOrder]:
        """Return one order for each worker."""
        counts: tuple[tuple[Role, int], ...] = (("prefill", self.prefill), ("decode", self.decode))
        return [self._order(role, number) for role, count in counts for number in range(count)]

    def _order(self, role: Role, number: int) -> WorkerOrder:
        registry, gpus = self.config.registry, self._gpus(role)
        settings = dict(self.settings)
        settings["registry.location"] = registry.location
        settings["registry.cluster"] = registry.cluster
        if gpus:
            settings["worker.device"] = "cuda"
        return WorkerOrder(
            worker_id=f"{role}-{number}",
            role=role,
            cluster=registry.cluster,
            model=self.model,
            settings=tuple(sorted(settings.items())),
            grace_s=self.grace_s,
            cpus=self.cpus * self.config.worker.tp,
            gpus=gpus,
            by_role=self.by_role,
            ranks=self.config.worker.tp,
            group=self.group,
        )


def _variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"BATON_{name.replace('.', '__').upper()}"
