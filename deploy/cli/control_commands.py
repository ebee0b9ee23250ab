"""The commands for what runs: `ps`, `drain`, `role`, `controller`, `advise`, `cluster status`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.deploy.cli.arguments import (
    ROLES,
    add_command,
    add_registry,
    add_settings,
    config_of,
)
from baton.runtime.errors import ConfigError

if TYPE_CHECKING:
    from baton.deploy.control.controller_process import FleetPlan
    from baton.deploy.control.orders import Cluster
    from baton.deploy.control.router_admin import RouterAdmin
    from baton.simulation.capacity.live_advice import MeasuredFleet

NO_TIMING = (
    "--timing is missing, and no fleet runs here: `baton advise --save FOLDER` writes the times of "
    "one, and `baton calibrate` fits published times or your own"
)
SEVERAL_FLEETS = (
    "--timing is missing, and several fleets run here ({names}): save the times of one with `baton "
    "advise --instance NAME --save FOLDER`"
)
RELEASE_S = 600.0  # as autoscalers wait before a worker leaves
RELEASE_LIMIT_S = 3600.0
START_S = 1800.0  # as the chart's workers.startupSeconds
START_LIMIT_S = 86400.0


def add_control_commands(commands: Any) -> None:
    text = "list what `baton serve` runs on this host, or with a registry a cluster's workers"
    _add_listing(add_command(commands, "ps", text, _ps))
    cluster = add_command(commands, "cluster", "look at a cluster of many hosts", _status)
    actions = cluster.add_subparsers(dest="action", required=True, metavar="ACTION", help="status")
    text = "list routers, workers and warnings of a cluster, from any host with its settings"
    _add_listing(add_command(actions, "status", text, _status))
    drain = "let a worker finish its requests and end; its supervisor starts it again"
    _add_target(add_command(commands, "drain", drain, _drain))
    change = "make a running worker a prefill or a decode worker"
    role = add_command(commands, "role", change, _role)
    _add_target(role)
    role.add_argument("role", choices=ROLES, help="its new role")
    text = "watch a cluster and advise role changes for its objectives, or make them"
    _add_controller(add_command(commands, "controller", text, _controller))
    text = "why TTFT and ITL are as they are, and what to change, by simulation of recent traffic"
    _add_advise(add_command(commands, "advise", text, _advise))


def _add_listing(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")
    add_registry(command, "the cluster's registry; needs BATON_TOKEN and [security]")
    add_settings(command)


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


def _add_controller(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--act", action="store_true", help="order the role changes (default: only advise)"
    )
    command.add_argument(
        "--port", type=int, default=0, metavar="N",
        help="for /metrics and /audit at worker.host (default: a free one, which it logs)",
    )  # fmt: skip
    command.add_argument(
        "--resize", metavar="TARGET",
        help="with --act and --workers, ask for more or fewer workers: statefulset/NAME or "
        "raycluster/NAME/GROUP in the namespace of the controller's pod, or fleet of `baton "
        "fleet --follow` elsewhere",
    )  # fmt: skip
    command.add_argument("--workers", metavar="MIN-MAX", help="bounds of --resize, such as 2-8")
    command.add_argument(
        "--release-s", type=float, default=RELEASE_S, metavar="SECONDS",
        help="for which fewer workers must be enough, before one leaves (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--start-s", type=float, default=START_S, metavar="SECONDS",
        help="longest start of a worker of --resize, after which it is overdue and no more are "
        "asked for (default: %(default)s)",
    )  # fmt: skip
    where = command.add_mutually_exclusive_group()
    where.add_argument("--instance", metavar="NAME", help="the instance, as `baton ps` shows it")
    add_registry(where, "the registry of a cluster; needs BATON_TOKEN and [security]")
    add_settings(command)


def _add_advise(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--watch", action="store_true", help="advise every minute, in the routers' consoles"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--save", type=Path, metavar="FOLDER",
        help="write timing.json and traffic.jsonl for `baton simulate` and `baton tune`",
    )  # fmt: skip
    where = command.add_mutually_exclusive_group()
    where.add_argument("--instance", metavar="NAME", help="the instance, as `baton ps` shows it")
    add_registry(where, "the registry of a cluster; needs BATON_TOKEN and [security]")
    command.add_argument(
        "--router", action="append", metavar="URL", default=[],
        help="admin port of a router, once for each; needs BATON_ADMIN_KEY (default: that of the "
        "instance)",
    )  # fmt: skip
    add_settings(command)


def _controller(options: argparse.Namespace) -> None:
    from baton.deploy.control.controller_process import run_controller

    fleet = fleet_plan(options)
    cluster = one_cluster(options)
    run_controller(config_of(options), cluster, acts=options.act, port=options.port, fleet=fleet)


def fleet_plan(options: argparse.Namespace) -> FleetPlan | None:
    """Return what --resize asks for. Raises ConfigError for options that do not fit together."""
    from baton.deploy.control.controller_process import FleetPlan
    from baton.deploy.control.resize_target import bounds_of, target_of
    from baton.planner.fleet_size import SizeBounds

    if options.resize is None:
        if options.workers is not None:
            raise ConfigError("--workers bounds --resize, which is not given: give both or none")
        return None
    if not options.act or options.workers is None:
        raise ConfigError("--resize changes the number of workers: give --act and --workers too")
    if not 0 <= options.release_s <= RELEASE_LIMIT_S:
        raise ConfigError(f"--release-s is {options.release_s:g}: give 0 to {RELEASE_LIMIT_S:g}")
    if not 1 <= options.start_s <= START_LIMIT_S:
        raise ConfigError(f"--start-s is {options.start_s:g}: give 1 to {START_LIMIT_S:g}")
    least, most = bounds_of(options.workers)
    bounds = SizeBounds(least, most, options.release_s)
    return FleetPlan(target_of(options.resize), bounds, options.start_s)


def _advise(options: argparse.Namespace) -> None:
    from baton.deploy.control.advice_process import run_once, run_watch

    config, cluster = config_of(options), one_cluster(options)
    routers = routers_of(options.router, cluster.name)
    if options.watch:
        run_watch(config, cluster, routers)
    else:
        run_once(config, cluster, routers, as_json=options.json, save=options.save)


def routers_of(urls: list[str], instance: str) -> list[RouterAdmin]:
    """Return the admin ports with their key: those given, or that of an instance of this host."""
    from baton.deploy.control.router_admin import RouterAdmin
    from baton.deploy.host.instance import ADMIN_KEY, ADMIN_KEY_FILE, live_instances
    from baton.deploy.host.router_trust import url_of
    from baton.deploy.serve.router_state import admin_address

    if urls:
        if not (key := os.environ.get(ADMIN_KEY, "")):
            raise ConfigError(f"{ADMIN_KEY} is not set: set it to the key of the routers given")
        return [RouterAdmin(url.rstrip("/"), key) for url in urls]
    for folder in live_instances():
        if folder.name == instance and (address := admin_address(folder)) is not None:
            key = (folder / ADMIN_KEY_FILE).read_text().strip()
            return [RouterAdmin(url_of(address), key)]
    raise ConfigError(
        f"{instance} has no router of this host with an admin port: give --router, as in "
        "http://127.0.0.1:9402"
    )


def one_cluster(options: argparse.Namespace) -> Cluster:
    """Return the cluster that the flags name, or the one that runs here. Raises ConfigError."""
    clusters = _clusters(options)
    ask = "give --instance or --registry; these instances run here: {names}"
    return _only(clusters, none=ask.format(names="none"), several=ask)


def running_fleet() -> MeasuredFleet:
    """Return the one fleet that runs on this host. Raises ConfigError if there is none or several,
    or it has served too little."""
    from baton.deploy.control.advice_process import read_fleet
    from baton.deploy.control.orders import live_clusters
    from baton.runtime.settings.loading import load

    cluster = _only(live_clusters(), none=NO_TIMING, several=SEVERAL_FLEETS)
    print(f"no --timing: times of {cluster.name}, which runs here", file=sys.stderr)
    return read_fleet(load(None, {}, {}), cluster, routers_of([], cluster.name))


def _only(clusters: list[Cluster], *, none: str, several: str) -> Cluster:
    """Return the only one. Raises ConfigError with the text for none, or for several."""
    if not clusters:
        raise ConfigError(none)
    if len(clusters) > 1:
        raise ConfigError(several.format(names=", ".join(each.name for each in clusters)))
    return clusters[0]


def _ps(options: argparse.Namespace) -> int:
    if config_of(options).registry.location:
        return _status(options)
    from baton.deploy.cli.process_list import show

    return show(as_json=options.json)


def _status(options: argparse.Namespace) -> int:
    from baton.deploy.cli.cluster_status import show
    from baton.deploy.control.orders import cluster_at
    from baton.deploy.host.cluster_secrets import read_secrets

    config = config_of(options)
    if not config.registry.location:
        raise ConfigError(
            "registry.location is not set: give --registry, or the cluster's settings with --config"
        )
    cluster = cluster_at(config.registry, read_secrets(os.environ), config.security)
    return show(cluster, as_json=options.json)


def _clusters(options: argparse.Namespace) -> list[Cluster]:
    from baton.deploy.control.orders import cluster_at, live_clusters
    from baton.deploy.host.cluster_secrets import read_secrets

    config = config_of(options)
    if config.registry.location and options.instance is None:
        return [cluster_at(config.registry, read_secrets(os.environ), config.security)]
    return live_clusters(options.instance)


def _drain(options: argparse.Namespace) -> None:
    from baton.deploy.control.orders import drain

    drain(options.worker, _clusters(options))


def _role(options: argparse.Namespace) -> None:
    from baton.deploy.control.orders import change_role

    change_role(options.worker, options.role, _clusters(options))
