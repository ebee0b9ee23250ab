"""The commands for a running instance: `ps`, `drain` and `role`."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from baton.deploy.cli.arguments import (
    ROLES,
    add_command,
    add_registry,
    add_settings,
    config_of,
)

if TYPE_CHECKING:
    from baton.deploy.cli.orders import Cluster


def add_control_commands(commands: Any) -> None:
    ps = add_command(commands, "ps", "list what `baton serve` runs on this host", _ps)
    ps.add_argument("--json", action="store_true", help="print JSON")
    drain = "let a worker finish its requests and end; `baton serve` starts it again"
    _add_target(add_command(commands, "drain", drain, _drain))
    change = "make a running worker a prefill or a decode worker"
    role = add_command(commands, "role", change, _role)
    _add_target(role)
    role.add_argument("role", choices=ROLES, help="its new role")


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "worker", metavar="WORKER", help="the worker's name, as `baton ps` shows it"
    )
    where = command.add_mutually_exclusive_group()
    where.add_argument("--instance", metavar="NAME", help="its instance, as `baton ps` shows it")
    add_registry(
        where,
        "the registry of a worker started by `baton worker`; needs BATON_TOKEN and [security]",
    )
    add_settings(command)


def _ps(options: argparse.Namespace) -> int:
    from baton.deploy.cli.process_list import show

    return show(as_json=options.json)


def _clusters(options: argparse.Namespace) -> list[Cluster]:
    from baton.deploy.cli.orders import cluster_at, live_clusters
    from baton.deploy.host.cluster_secrets import read_secrets

    config = config_of(options)
    if config.registry.location and options.instance is None:
        return [cluster_at(config.registry, read_secrets(os.environ), config.security)]
    return live_clusters(options.instance)


def _drain(options: argparse.Namespace) -> None:
    from baton.deploy.cli.orders import drain

    drain(options.worker, _clusters(options))


def _role(options: argparse.Namespace) -> None:
    from baton.deploy.cli.orders import change_role

    change_role(options.worker, options.role, _clusters(options))
