"""`baton authority`: create a certificate authority, and issue certificates to processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from baton.deploy.cli.arguments import add_command
from baton.deploy.serve.flag_values import whole
from baton.runtime.errors import ConfigError

MAX_DAYS = 3650
CALLED = ("worker", "redis")  # at the hosts that their certificates name
ROLES = (*CALLED, "router", "client")


def add_authority(commands: Any) -> None:
    text = "create a certificate authority for processes of many hosts, and issue certificates"
    command = add_command(commands, "authority", text, _issue)
    actions = command.add_subparsers(
        dest="action", required=True, metavar="ACTION", help="create or issue"
    )
    create = add_command(actions, "create", "create an authority in a folder", _create)
    _add_folder(create, MAX_DAYS)
    issue = add_command(actions, "issue", "issue a certificate to one process", _issue)
    _add_folder(issue, 90)
    issue.add_argument(
        "--role",
        choices=ROLES,
        required=True,
        help="worker: it is called and calls others; redis: a Redis server, which is called; "
        "router and client: they call workers",
    )
    issue.add_argument("--name", required=True, metavar="NAME", help="the process, as --worker-id")
    issue.add_argument(
        "--host", action="append", default=[], metavar="HOST",
        help="address or name at which a worker (worker.advertise) or a Redis server is called; "
        "may be repeated",
    )  # fmt: skip
    issue.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the three files"
    )


def _add_folder(command: argparse.ArgumentParser, days: int) -> None:
    command.add_argument(
        "--folder", type=Path, required=True, metavar="DIR", help="the authority's folder"
    )
    command.add_argument(
        "--days", type=whole(1, MAX_DAYS), default=days, metavar="N",
        help="how long the certificate is valid (default: %(default)s)",
    )  # fmt: skip


def _create(options: argparse.Namespace) -> None:
    from baton.deploy.host.stored_authority import create_authority

    certificate = create_authority(options.folder, options.days)
    print(f"created {certificate}; the key beside it issues certificates: keep it on this host")


def _issue(options: argparse.Namespace) -> None:
    from baton.deploy.host.stored_authority import Request, issue

    if (options.role in CALLED) != bool(options.host):
        raise ConfigError(
            f"the certificate of a {options.role} names the hosts where other processes "
            "call it: give --host"
            if options.role in CALLED
            else f"--host is for {' and '.join(CALLED)}, and no process calls a {options.role}: "
            "leave it out"
        )
    request = Request(options.name, tuple(options.host), options.days)
    files = issue(options.folder, options.out, request)
    if options.role == "redis":
        print(f"tls-cert-file {files.certificate}")
        print(f"tls-key-file {files.key}")
        print(f"tls-ca-cert-file {files.authority}")
        return
    for name, path in files.settings().items():
        print(f"{name}={path}")
