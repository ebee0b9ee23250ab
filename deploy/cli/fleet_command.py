"""The command `baton fleet`: workers on the nodes of a Ray cluster."""

from __future__ import annotations

import argparse
import os
from typing import Any

from baton.deploy.cli.arguments import (
    ROLES,
    add_command,
    add_registry,
    add_settings,
    config_of,
    flags_of,
)
from baton.deploy.serve.flag_values import MAX_PORT, seconds, whole

MAX_FLEET = 1024  # workers of one role
MAX_PER_WORKER = 64  # GPUs or cores


def add_fleet(commands: Any) -> None:
    text = "keep prefill and decode workers on the nodes of a Ray cluster; `baton router` serves"
    command = add_command(commands, "fleet", text, _fleet)
    command.add_argument(
        "model", nargs="?", metavar="FOLDER", default="",
        help="the model's folder on each node; none: the embedded model",
    )  # fmt: skip
    for role, least in (("prefill", 0), ("decode", 1)):
        command.add_argument(
            f"--{role}", type=whole(least, MAX_FLEET), default=1, metavar="N",
            help=f"{role} workers (default: %(default)s)",
        )  # fmt: skip
    command.add_argument(
        "--ray-address", default=os.environ.get("RAY_ADDRESS", "auto"), metavar="ADDRESS",
        help="the Ray cluster, of which this host is a node (default: RAY_ADDRESS, else auto)",
    )  # fmt: skip
    for name, default, what in (
        ("cpus", 1, "cores that Ray reserves for each rank of a worker, all on one node"),
        ("gpus", 0, "GPUs that Ray reserves for each worker"),
    ):
        command.add_argument(
            f"--{name}", type=whole(0, MAX_PER_WORKER), default=default, metavar="N",
            help=f"{what} (default: %(default)s)",
        )  # fmt: skip
    for role in ROLES:
        command.add_argument(
            f"--{role}-gpus", type=whole(0, MAX_PER_WORKER), metavar="N",
            help=f"GPUs of each {role} worker, where they differ from --gpus",
        )  # fmt: skip
    _add_placement(command)
    command.add_argument(
        "--leave-workers", action="store_true",
        help="SIGTERM ends this process alone, and the next one finds the workers",
    )  # fmt: skip
    command.add_argument(
        "--follow", action="store_true",
        help="let `baton controller --resize fleet` change the number of decode workers, which "
        "begins with --decode",
    )  # fmt: skip
    command.add_argument(
        "--admin-port", type=whole(0, MAX_PORT), default=0, metavar="PORT",
        help="port of metrics and health at worker.host; 0: the system chooses one "
        "(default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--start-timeout", type=seconds(86_400), metavar="SECONDS",
        help="end with an error, and end the workers, if one is given up or not ready by then "
        "(default: it is tried again each minute)",
    )  # fmt: skip
    add_registry(command, "redis://HOST:PORT, where workers register (registry.location)")
    add_settings(command, file=False)  # the nodes do not have this host's files


def _add_placement(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--by-role", action="store_true",
        help="place a worker only where Ray has the resource baton-prefill or baton-decode, one "
        "for each worker",
    )  # fmt: skip
    command.add_argument(
        "--group", default="", metavar="NAME",
        help="place workers of both roles only where Ray has the resource baton-NAME, one for "
        "each; with --by-role baton-NAME-prefill or baton-NAME-decode; so that fleets of several "
        "models can share a Ray cluster",
    )  # fmt: skip
    command.add_argument(
        "--pack", action="store_true", help="fill nodes one by one (default: spread workers)"
    )


def _fleet(options: argparse.Namespace) -> None:
    from baton.deploy.control.orders import cluster_at
    from baton.deploy.host.cluster_secrets import read_secrets
    from baton.deploy.nodes.fleet_plan import FleetOptions
    from baton.deploy.nodes.fleet_process import FleetProcess
    from baton.deploy.serve.plan import grace_s

    config = config_of(options)
    fleet = FleetOptions(
        config=config,
        settings=flags_of(options),
        prefill=options.prefill,
        decode=options.decode,
        model=options.model,
        cpus=options.cpus,
        gpus=options.gpus,
        prefill_gpus=options.prefill_gpus,
        decode_gpus=options.decode_gpus,
        by_role=options.by_role,
        group=options.group,
        grace_s=grace_s(config),
    )
    fleet.check()
    cluster = cluster_at(config.registry, read_secrets(os.environ), config.security)
    FleetProcess(
        fleet,
        cluster,
        options.ray_address,
        options.pack,
        options.leave_workers,
        options.follow,
        options.admin_port,
        options.start_timeout or 0.0,
    ).run()
