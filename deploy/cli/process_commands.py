"""The commands that run one process of a cluster: `worker` and `router`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from baton.deploy.cli.arguments import (
    ROLES,
    add_command,
    add_registry,
    add_settings,
    config_of,
    flags_of,
)
from baton.deploy.host.instance import ADMIN_KEY
from baton.deploy.serve.flag_values import MAX_PORT, whole


def add_process_commands(commands: Any) -> None:
    _add_worker(commands)
    _add_router(commands)


def _add_model_and_registry(command: argparse.ArgumentParser) -> None:
    """Add the options that a router and a worker both need."""
    command.add_argument(
        "--model", type=Path, required=True, metavar="FOLDER", help="in Hugging Face format"
    )
    add_registry(
        command,
        "where workers register (registry.location): a folder of this host, private to this user, "
        "or redis://HOST:PORT for many hosts",
    )


def _add_worker(commands: Any) -> None:
    text = "run one worker (what `baton serve` starts); needs BATON_TOKEN"
    command = add_command(commands, "worker", text, _worker)
    command.add_argument("--role", choices=ROLES, required=True, help="its first role")
    command.add_argument(
        "--worker-id", required=True, metavar="ID", help="its name, unique in the registry"
    )
    _add_model_and_registry(command)
    add_settings(command)


def _add_router(commands: Any) -> None:
    text = "run one router (what `baton serve` starts); needs BATON_TOKEN"
    command = add_command(commands, "router", text, _router)
    _add_model_and_registry(command)
    command.add_argument(
        "--model-name", metavar="NAME", help="as clients call it (default: the folder's name)"
    )
    command.add_argument(
        "--address-file",
        type=Path,
        metavar="FILE",
        help="file to which the router writes host:port once it listens",
    )
    command.add_argument(
        "--admin-port", type=whole(0, MAX_PORT), metavar="PORT",
        help="port of the console and of operators' routes, opened by the key in BATON_ADMIN_KEY; "
        "0: the system chooses one (default: no such port)",
    )  # fmt: skip
    command.add_argument(
        "--admin-host", default="127.0.0.1", metavar="HOST",
        help="address to listen on for it (default: %(default)s)",
    )  # fmt: skip
    add_settings(command)


def _worker(options: argparse.Namespace) -> None:
    from baton.deploy.host.cluster_secrets import read_secrets
    from baton.deploy.host.packages import check_worker_packages
    from baton.deploy.host.process_lifecycle import end_at_sigterm

    end_at_sigterm()
    secrets = read_secrets(os.environ)
    config = config_of(options)
    check_worker_packages(config.worker.device)
    from baton.deploy.processes.worker_process import run_worker
    from baton.deploy.serve.device_defaults import worker_config

    run_worker(
        worker_config(config, options.config, flags_of(options)),
        role=options.role,
        worker_id=options.worker_id,
        model_folder=options.model,
        secrets=secrets,
    )


def _router(options: argparse.Namespace) -> None:
    from baton.deploy.host.cluster_secrets import read_secrets
    from baton.deploy.host.process_lifecycle import end_at_sigterm

    end_at_sigterm()
    from baton.deploy.processes.router_process import run_router
    from baton.router.console.admin_port import AdminAccess

    admin = None
    if options.admin_port is not None:
        key = os.environ.get(ADMIN_KEY, "")
        admin = AdminAccess(key, options.admin_host, options.admin_port)
    run_router(
        config_of(options),
        model_folder=options.model,
        model_name=options.model_name or options.model.resolve().name,
        secrets=read_secrets(os.environ),
        address_file=options.address_file,
        admin=admin,
    )
