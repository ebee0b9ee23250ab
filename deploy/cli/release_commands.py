"""`baton release`: what the chart's hooks and tests run in a cluster."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from baton.deploy.cli.arguments import add_command, add_settings, config_of
from baton.deploy.serve.flag_values import seconds
from baton.runtime.errors import ConfigError, Unavailable


def add_release(commands: Any) -> None:
    group = commands.add_parser(
        "release",
        help="what the Helm chart's hooks and tests run",
        description="What the Helm chart's hooks and tests run in a cluster.",
    )
    steps = group.add_subparsers(dest="step", required=True, metavar="STEP", help="what to do")
    made = add_command(
        steps, "secrets", "create the Secrets of a release that are missing (in a pod)", _secrets
    )
    made.add_argument("--namespace", required=True, help="the release's namespace")
    made.add_argument("--name", required=True, help="what the Secrets' names begin with")
    made.add_argument(
        "--credentials", action="store_true", help="create token, API key and Redis password"
    )
    made.add_argument(
        "--certificates",
        metavar="NAME",
        help="create certificates; those of workers have this name",
    )
    made.add_argument(
        "--redis",
        metavar="NAME",
        action="append",
        default=[],
        help="with --certificates: also make one for the release's Redis, with this name; may be "
        "repeated",
    )
    made.add_argument(
        "--ray",
        action="store_true",
        help="with --certificates: also make the authority that issues certificates to Ray's pods",
    )
    _add_check(steps)
    _add_node_steps(steps)
    _add_replace(steps)


def _add_check(steps: Any) -> None:
    check = add_command(
        steps,
        "check",
        "ask a release, and fail unless KV moved between its workers; BATON_API_KEY holds API "
        "keys, separated by commas, of which the first is sent",
        _check,
    )
    check.add_argument("--url", required=True, help="URL of the routers")
    check.add_argument(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="the certificate (PEM) that the routers have to present; by default one of an "
        "authority of the system, with the host's name",
    )
    check.add_argument(
        "--model", required=True, metavar="NAME", help="the model, as clients call it"
    )
    check.add_argument(
        "--decode",
        action="append",
        required=True,
        metavar="URL",
        help="admin port of the decode workers, each address of whose host is one worker; may be "
        "repeated",
    )


def _add_node_steps(steps: Any) -> None:
    leave = add_command(
        steps,
        "leave",
        "drain the workers that `baton fleet` keeps on this node, which starts none until it joins "
        "again or restarts",
        _leave,
    )
    leave.add_argument(
        "--within", type=seconds(86_400), required=True, metavar="SECONDS",
        help="time limit until they have ended",
    )  # fmt: skip
    add_settings(leave)
    join = add_command(
        steps, "join", "let this node start workers again, after `baton release leave`", _join
    )
    add_settings(join)


def _add_replace(steps: Any) -> None:
    replace = add_command(
        steps,
        "replace",
        "replace the pods of a RayCluster that are older than its definition, one by one, with "
        "kubectl: each worker drains before its pod goes",
        _replace,
    )
    replace.add_argument("name", metavar="RAYCLUSTER", help="the release's RayCluster")
    replace.add_argument(
        "--namespace", default="", help="its namespace (default: that of kubectl's context)"
    )
    replace.add_argument(
        "--within", type=seconds(86_400), default=1800.0, metavar="SECONDS",
        help="time limit for each pod to drain, and for its successor to be ready "
        "(default: %(default)g)",
    )  # fmt: skip


def _check(options: argparse.Namespace) -> None:
    from baton.deploy.cli.chat import ChatClient
    from baton.deploy.cli.release_check import check_release

    key = os.environ.get("BATON_API_KEY", "").split(",")[0]
    routers = ChatClient(options.url, key or None, options.certificate)
    check_release(routers, options.model, options.decode)


def _leave(options: argparse.Namespace) -> None:
    import time

    from baton.deploy.nodes.node_folder import leave

    cluster = config_of(options).registry.cluster
    if not leave(cluster, os.environ, time.monotonic() + options.within):
        raise Unavailable(f"a worker has not ended within {options.within:g} s: see its log")


def _join(options: argparse.Namespace) -> None:
    from baton.deploy.nodes.node_folder import join

    join(config_of(options).registry.cluster, os.environ)


def _replace(options: argparse.Namespace) -> None:
    from baton.deploy.nodes.pod_replacement import Replacement, kubectl_in

    replacement = Replacement(options.name, options.within, kubectl_in(options.namespace))
    count = replacement.run()
    print(f"{count} pods replaced; all are of the present definition")


def _secrets(options: argparse.Namespace) -> None:
    from baton.deploy.host.kubernetes_api import api_server
    from baton.deploy.host.release_secrets import create_certificates, create_credentials
    from baton.deploy.host.secrets_api import SecretsApi

    for option in ("redis", "ray"):
        if getattr(options, option) and not options.certificates:
            raise ConfigError(f"--{option} is given without --certificates: give both, or neither")
    api = SecretsApi(options.namespace, *api_server(os.environ))
    if options.credentials:
        made = create_credentials(api, options.name)
        print(f"{options.name}-secrets: {'created' if made else 'was there'}")
    if options.certificates:
        for name in create_certificates(
            api, options.name, options.certificates, redis_names=options.redis, ray=options.ray
        ):
            print(f"{name}: created")
