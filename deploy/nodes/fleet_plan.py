"""The plan of `baton fleet`: which workers a fleet on a Ray cluster has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from baton.deploy.nodes.worker_order import EMBEDDED, WorkerOrder
from baton.runtime.config import Config
from baton.runtime.errors import ConfigError
from baton.runtime.registry import Role
from baton.runtime.shared_registry.registry_location import folder_of

SECRET_SETTINGS = ("registry.password", "router.api_keys")
OF_ONE_NODE = ("worker.host", "worker.advertise", "worker.port", "worker.admin_port")


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The options of `baton fleet`. `settings` are `section.key`: text, of the command line."""

    config: Config
    settings: Mapping[str, str]
    prefill: int = 1
    decode: int = 1
    model: str = EMBEDDED
    cpus: float = 1.0
    gpus: float = 0.0
    by_role: bool = False
    grace_s: float = 60.0

    def check(self) -> None:
        """Raise ConfigError naming the option that cannot work."""
        if folder_of(self.config.registry) is not None:
            raise ConfigError(
                f"registry.location is the folder {self.config.registry.location}, which other "
                "nodes do not see: give --registry redis://HOST:PORT"
            )
        if urlsplit(self.config.registry.location).password is not None:
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
        device = self.config.worker.device
        if device.startswith("cuda") and not self.gpus:
            raise ConfigError(f"worker.device is {device}, and --gpus 0: give --gpus 1 or more")
        if device == "cpu" and self.gpus:
            raise ConfigError(f"--gpus is {self.gpus:g}, and worker.device is cpu: give --gpus 0")
        if ":" in device:
            raise ConfigError(
                f"worker.device is {device}, and Ray chooses the GPUs of its actors: give cuda"
            )

    def orders(self) -> list[WorkerOrder]:
        """Return one order for each worker."""
        settings = dict(self.settings)
        settings["registry.location"] = self.config.registry.location
        settings["registry.cluster"] = self.config.registry.cluster
        if self.gpus:
            settings["worker.device"] = "cuda"
        roles: tuple[tuple[Role, int], ...] = (("prefill", self.prefill), ("decode", self.decode))
        return [
            WorkerOrder(
                worker_id=f"{role}-{number}",
                role=role,
                cluster=self.config.registry.cluster,
                model=self.model,
                settings=tuple(sorted(settings.items())),
                grace_s=self.grace_s,
                cpus=self.cpus,
                gpus=self.gpus,
                by_role=self.by_role,
            )
            for role, count in roles
            for number in range(count)
        ]


def _variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"BATON_{name.replace('.', '__').upper()}"
