"""The command `baton`: what each subcommand takes, and which module does it.

Nothing heavy is imported before a subcommand is chosen, so that `baton --help` is instant.
Owns no state; errors end as one line and an exit code (process_exit.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.runtime.errors import ConfigError

if TYPE_CHECKING:
    from baton.deploy.orders import Cluster
    from baton.runtime.config import Config

DISTRIBUTION = "baton-serve"
FLAG_SETTINGS = {  # option -> setting, for the options that are settings
    "host": "router.host",
    "port": "router.port",
    "grpc_port": "router.grpc_port",
    "placement": "router.placement",
    "device": "worker.device",
    "dtype": "worker.dtype",
    "blocks": "pool.blocks",
    "quantization": "worker.quantization",
    "kv_dtype": "pool.kv_dtype",
    "deterministic": "worker.deterministic",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    from baton.deploy.process_exit import exiting

    options = parser().parse_args(arguments)
    return exiting(lambda: options.run(options))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="baton",
        description="Serves language models with prefill and decode on separate workers.",
    )
    top.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands, "serve", "start a router and workers on this host", _serve)
    demo = _add_serve(commands, "demo", "serve, and show the first tokens", _demo)
    demo.add_argument("--once", action="store_true", help="end after the first answer")
    demo.set_defaults(placement="disaggregated")
    _add_worker(commands)
    _add_router(commands)
    _add_chat(commands)
    _add_faults(commands)
    ps = commands.add_parser("ps", help="list what runs on this host")
    ps.add_argument("--json", action="store_true", help="as JSON")
    ps.set_defaults(run=_ps)
    drain = commands.add_parser(
        "drain", help="let a worker finish what it has and end; `baton serve` starts it again"
    )
    _add_ordered(drain)
    drain.set_defaults(run=_drain)
    role = commands.add_parser("role", help="make a running worker a prefill or a decode worker")
    _add_ordered(role)
    role.add_argument("role", choices=("prefill", "decode"))
    role.set_defaults(run=_role)
    doctor = commands.add_parser("doctor", help="check this machine, and say what to do")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    _add_settings(doctor)
    doctor.set_defaults(run=_doctor)
    return top


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from importlib.metadata import version

        print(f"{parser.prog} {version(DISTRIBUTION)}")
        parser.exit()


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    command.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
        help="one setting; wins over file and environment; may be repeated",
    )  # fmt: skip


def _add_serve(commands: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a model folder or a hub id (owner/name[@revision]); none: the embedded model",
    )  # fmt: skip
    command.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill workers")
    command.add_argument("--decode", type=int, default=1, metavar="N", help="decode workers")
    command.add_argument("--host", help="the router's address (router.host)")
    command.add_argument("--port", help="the router's port (router.port)")
    command.add_argument(
        "--grpc-port", metavar="PORT",
        help="serve gRPC clients too; 0: on a port that the system gives (router.grpc_port)",
    )  # fmt: skip
    command.add_argument("--placement", choices=("auto", "disaggregated", "local"))
    command.add_argument(
        "--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (worker.device)"
    )
    command.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    command.add_argument(
        "--quantization", choices=("none", "int8", "int4"),
        help="make smaller weights of plain ones at load (worker.quantization)",
    )  # fmt: skip
    command.add_argument(
        "--kv-dtype", choices=("auto", "int8", "fp8_e4m3"),
        help="keep KV in eight bits: twice the tokens, less exact (pool.kv_dtype)",
    )  # fmt: skip
    command.add_argument(
        "--deterministic", action="store_const", const="true",
        help="a request's tokens depend on nothing else that is served (worker.deterministic)",
    )  # fmt: skip
    command.add_argument("--blocks", metavar="N", help="KV blocks per worker (pool.blocks)")
    command.add_argument("--launcher", choices=("ray", "process"), default="ray")
    command.add_argument(
        "--ray-address", default=os.environ.get("RAY_ADDRESS", ""), metavar="ADDRESS",
        help="a running Ray (default: RAY_ADDRESS, else a local one is started)",
    )  # fmt: skip
    command.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS")
    _add_settings(command)
    command.set_defaults(run=run)
    return command


def _add_ordered(command: Any) -> None:
    command.add_argument("worker", metavar="WORKER", help="its name, as `baton ps` shows it")
    where = command.add_mutually_exclusive_group()
    where.add_argument("--instance", metavar="NAME", help="as `baton ps` shows it")
    where.add_argument(
        "--registry",
        type=Path,
        metavar="DIR",
        help="of a `baton worker` that was started alone, with its BATON_TOKEN",
    )


def _add_worker(commands: Any) -> None:
    command = commands.add_parser("worker", help="run one worker (what `baton serve` starts)")
    command.add_argument("--role", choices=("prefill", "decode"), required=True)
    command.add_argument("--worker-id", required=True)
    command.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    command.add_argument("--registry", type=Path, required=True, metavar="DIR")
    _add_settings(command)
    command.set_defaults(run=_worker)


def _add_router(commands: Any) -> None:
    command = commands.add_parser("router", help="run one router (what `baton serve` starts)")
    command.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    command.add_argument("--model-name", help="as clients call it (default: the folder's name)")
    command.add_argument("--registry", type=Path, required=True, metavar="DIR")
    command.add_argument("--address-file", type=Path, help="written with host:port when it listens")
    _add_settings(command)
    command.set_defaults(run=_router)


def _add_chat(commands: Any) -> None:
    command = commands.add_parser("chat", help="talk to a running server")
    command.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    command.add_argument("--model", metavar="NAME", help="default: the first that is served")
    command.add_argument("--system", metavar="TEXT", help="the system message")
    command.set_defaults(run=_chat)


def _add_faults(commands: Any) -> None:
    command = commands.add_parser(
        "faults", help="the fault lab: simulated fleets under faults, each promise checked"
    )
    command.add_argument("--seeds", type=int, default=2000, metavar="N")
    command.add_argument("--from", type=int, default=0, metavar="S", dest="first")
    command.add_argument("--jobs", type=int, default=1, metavar="J", help="processes")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    command.add_argument(
        "--keep", metavar="PLACES", help="of each seed's events only these (0,3,7)"
    )
    command.add_argument(
        "--mutation", default="", metavar="NAME", help="break the product so; is it noticed?"
    )
    command.add_argument(
        "--engine", choices=("hash", "model"), default="hash",
        help="what fleets compute: hashes, or the embedded model (a hundred times as slow)",
    )  # fmt: skip
    command.set_defaults(run=_faults)


def flags_of(options: argparse.Namespace) -> dict[str, str]:
    """The settings given on the command line. Raises ConfigError for a malformed --set."""
    given = {
        setting: str(getattr(options, name))
        for name, setting in FLAG_SETTINGS.items()
        if getattr(options, name, None) is not None
    }
    for text in options.set:
        name, equals, value = text.partition("=")
        if not equals or name.count(".") != 1:
            raise ConfigError(f"--set {text}: write it as section.key=value")
        given[name.strip()] = value.strip()
    return given


def _config(options: argparse.Namespace) -> Config:
    from baton.runtime.settings import load

    return load(options.config, os.environ, flags_of(options))


def _serve_options(options: argparse.Namespace) -> Any:
    from baton.deploy.plan import ServeOptions

    return ServeOptions(
        config=_config(options),
        prefill=options.prefill,
        decode=options.decode,
        model=options.model,
        config_file=options.config,
        flags=flags_of(options),
        launcher=options.launcher,
        ray_address=options.ray_address,
        start_timeout_s=options.start_timeout,
    )


def _serve(options: argparse.Namespace) -> None:
    from baton.deploy.serve import serve

    serve(_serve_options(options))


def _demo(options: argparse.Namespace) -> None:
    from baton.deploy.demo import demo

    demo(_serve_options(options), once=options.once)


def _token() -> str:
    token = os.environ.get("BATON_TOKEN", "")
    if not token:
        raise ConfigError(
            "BATON_TOKEN is not set: give all processes of a cluster the same secret in it"
        )
    return token


def _worker(options: argparse.Namespace) -> None:
    token = _token()
    from baton.deploy.packages import check_worker_packages

    check_worker_packages()
    from baton.deploy.worker_process import run_worker

    run_worker(
        _config(options),
        role=options.role,
        worker_id=options.worker_id,
        model_folder=options.model,
        registry_folder=options.registry,
        token=token,
    )


def _router(options: argparse.Namespace) -> None:
    token = _token()
    from baton.deploy.router_process import run_router

    run_router(
        _config(options),
        model_folder=options.model,
        model_name=options.model_name or options.model.resolve().name,
        registry_folder=options.registry,
        token=token,
        address_file=options.address_file,
    )


def _chat(options: argparse.Namespace) -> None:
    from baton.deploy.chat import chat

    chat(options.url, options.model, os.environ.get("BATON_API_KEY"), options.system)


def _faults(options: argparse.Namespace) -> int:
    from baton.models.embedded import embedded_model
    from baton.simulation.fault_report import faults

    keep = None
    if options.keep is not None:
        places = options.keep.split(",")
        if not all(place.isdecimal() for place in places):
            raise ConfigError(f"--keep {options.keep}: give numbers of events, as 0,3,7")
        keep = [int(place) for place in places]
    return faults(
        options.first,
        options.seeds,
        jobs=options.jobs,
        json_file=options.json,
        mutation=options.mutation,
        keep=keep,
        model=embedded_model() if options.engine == "model" else None,
    )


def _ps(options: argparse.Namespace) -> int:
    from baton.deploy.processes import show

    return show(as_json=options.json)


def _clusters(options: argparse.Namespace) -> list[Cluster]:
    from baton.deploy.orders import cluster_at, live_clusters

    if options.registry is not None:
        return [cluster_at(options.registry, _token())]
    return live_clusters(options.instance)


def _drain(options: argparse.Namespace) -> None:
    from baton.deploy.orders import drain

    drain(options.worker, _clusters(options))


def _role(options: argparse.Namespace) -> None:
    from baton.deploy.orders import change_role

    change_role(options.worker, options.role, _clusters(options))


def _doctor(options: argparse.Namespace) -> int:
    from baton.deploy.doctor import doctor

    return doctor(_config(options), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
