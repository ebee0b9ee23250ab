"""The command `baton`: what each subcommand takes, and which module does it.

Nothing heavy is imported before a subcommand is chosen, so that `baton --help` is instant.
Owns no state; errors end as one line and an exit code (process_lifecycle.py).
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.deploy.serve.flag_values import (
    FLAG_SETTINGS,
    MOST_WORKERS,
    SETTINGS_TOLD,
    assignment,
    default_of,
    new_file,
    seconds,
    setting,
    whole,
)
from baton.runtime import tls_version  # noqa: F401  before anything imports grpc
from baton.runtime.errors import ConfigError

if TYPE_CHECKING:
    from baton.deploy.cli.orders import Cluster
    from baton.runtime.config import Config

DISTRIBUTION = "baton-serve"
ROLES = ("prefill", "decode")
COMMANDS = (
    "serve", "demo", "worker", "router", "chat", "faults", "ps", "drain", "role", "doctor",
)  # fmt: skip
EXIT_CODES = (
    "Exit codes: 0 done; 1 it failed (ps: nothing runs; doctor: something is to be done; faults: "
    "a promise was broken); 2 the command line is wrong; 70 a worker's device failed; 78 a "
    "setting, a model or a port is; 130 Ctrl-C."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    from baton.deploy.host.process_lifecycle import run_to_exit_code

    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    made = parser()
    _check_command(made, given[0])
    options = made.parse_args(given)
    return run_to_exit_code(lambda: options.run(options))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="baton",
        description="Serves language models with prefill and decode on separate workers.",
        epilog=EXIT_CODES,
    )
    top.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands, "serve", "start a router and workers on this host", _serve)
    demo = _add_serve(
        commands, "demo", "serve, and show the first answer", _demo, placement="disaggregated"
    )
    demo.add_argument("--once", action="store_true", help="end after the first answer")
    _add_worker(commands)
    _add_router(commands)
    _add_chat(commands)
    _add_faults(commands)
    ps = _add(commands, "ps", "list what `baton serve` runs on this host", _ps)
    ps.add_argument("--json", action="store_true", help="as JSON")
    drain = "let a worker finish what it has and end; `baton serve` starts it again"
    _add_ordered(_add(commands, "drain", drain, _drain))
    role = _add(commands, "role", "make a running worker a prefill or a decode worker", _role)
    _add_ordered(role)
    role.add_argument("role", choices=ROLES, help="what it is to be")
    doctor = _add(commands, "doctor", "check this machine, and say what to do", _doctor)
    doctor.add_argument("--json", action="store_true", help="as JSON")
    _add_settings(doctor)
    return top


def _check_command(made: argparse.ArgumentParser, word: str) -> None:
    """End the process with a suggestion if the first word is no command."""
    if word.startswith("-") or word in COMMANDS:
        return
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean `baton {near[0]}`?" if near else "`baton --help` lists the commands"
    made.error(f"there is no command {word!r}: {hint}")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from importlib.metadata import version

        print(f"{parser.prog} {version(DISTRIBUTION)}")
        parser.exit()


def _add(commands: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    return command


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    command.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", type=assignment,
        help="one setting, as runtime/baton.toml lists them with their units and defaults; wins "
        "over file and environment; may be repeated",
    )  # fmt: skip


def _add_serve(
    commands: Any, name: str, text: str, run: Any, placement: str | None = None
) -> argparse.ArgumentParser:
    command = _add(commands, name, text, run)
    command.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a model folder or a hub id (owner/name[@revision]); none: the embedded model",
    )  # fmt: skip
    command.add_argument(
        "--prefill", type=whole(0, MOST_WORKERS), default=1, metavar="N",
        help=f"prefill workers, at most {MOST_WORKERS} (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--decode", type=whole(1, MOST_WORKERS), default=1, metavar="N",
        help=f"decode workers, 1 to {MOST_WORKERS}: only they emit tokens (default: %(default)s)",
    )  # fmt: skip
    for option, metavar, told in SETTINGS_TOLD:
        setting_name = FLAG_SETTINGS[option.removeprefix("--").replace("-", "_")]
        own = placement if option == "--placement" else None
        default = f"{setting_name}; default: {own}" if own else default_of(setting_name)
        command.add_argument(
            option, type=setting(setting_name), metavar=metavar, default=own,
            help=f"{told} ({default})",
        )  # fmt: skip
    command.add_argument(
        "--deterministic", action="store_const", const="true",
        help="a request's tokens depend on nothing else that is served (worker.deterministic)",
    )  # fmt: skip
    command.add_argument(
        "--launcher", choices=("ray", "process"), default="ray",
        help="who keeps the workers running; process: without Ray (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--ray-address", default=os.environ.get("RAY_ADDRESS", ""), metavar="ADDRESS",
        help="a running Ray (default: RAY_ADDRESS, else a local one is started)",
    )  # fmt: skip
    command.add_argument(
        "--start-timeout", type=seconds(86_400), default=600.0, metavar="SECONDS",
        help="until all workers are ready, else it gives up (default: %(default)g)",
    )  # fmt: skip
    _add_settings(command)
    return command


def _add_ordered(command: argparse.ArgumentParser) -> None:
    command.add_argument("worker", metavar="WORKER", help="its name, as `baton ps` shows it")
    where = command.add_mutually_exclusive_group()
    where.add_argument("--instance", metavar="NAME", help="as `baton ps` shows it")
    where.add_argument(
        "--registry", type=Path, metavar="DIR",
        help="that of a worker started alone; needs BATON_TOKEN and the settings of [security]",
    )  # fmt: skip
    _add_settings(command)


def _add_alone(command: argparse.ArgumentParser) -> None:
    """What a router and a worker that are started alone both need."""
    command.add_argument(
        "--model", type=Path, required=True, metavar="FOLDER", help="in Hugging Face format"
    )
    command.add_argument(
        "--registry", type=Path, required=True, metavar="DIR",
        help="where workers announce themselves: the same for all of a cluster, closed to others",
    )  # fmt: skip


def _add_worker(commands: Any) -> None:
    text = "run one worker (what `baton serve` starts); needs BATON_TOKEN"
    command = _add(commands, "worker", text, _worker)
    command.add_argument("--role", choices=ROLES, required=True, help="what it begins as")
    command.add_argument(
        "--worker-id", required=True, metavar="ID", help="its name, one in the registry"
    )
    _add_alone(command)
    _add_settings(command)


def _add_router(commands: Any) -> None:
    text = "run one router (what `baton serve` starts); needs BATON_TOKEN"
    command = _add(commands, "router", text, _router)
    _add_alone(command)
    command.add_argument(
        "--model-name", metavar="NAME", help="as clients call it (default: the folder's name)"
    )
    command.add_argument(
        "--address-file", type=Path, metavar="FILE", help="written with host:port when it listens"
    )
    _add_settings(command)


def _add_chat(commands: Any) -> None:
    text = "talk to a running server; BATON_API_KEY is the key, if it asks for one"
    command = _add(commands, "chat", text, _chat)
    command.add_argument(
        "--url", help="of the server (default: that of the instance that runs on this host)"
    )
    command.add_argument("--model", metavar="NAME", help="default: the first that is served")
    command.add_argument("--system", metavar="TEXT", help="the system message (default: none)")


def _add_faults(commands: Any) -> None:
    text = "the fault lab: simulated fleets under faults, each promise checked"
    command = _add(commands, "faults", text, _faults)
    command.add_argument(
        "--seeds", type=whole(1, 1 << 40), default=2000, metavar="N",
        help="fleets, one a seed (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--from", type=whole(0, 1 << 40), default=0, metavar="S", dest="first",
        help="the first seed (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--jobs", type=whole(1, 1024), default=1, metavar="J",
        help="processes, one a core at most is of use (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--json", type=new_file, metavar="FILE", help="write the report there")
    command.add_argument(
        "--keep", metavar="PLACES", help="of each seed's events only these, as 0,3,7"
    )
    command.add_argument(
        "--mutation", default="", metavar="NAME", help="break the product so; is it noticed?"
    )
    command.add_argument(
        "--engine", choices=("hash", "model"), default="hash",
        help="what fleets compute: hashes, or the embedded model, a hundred times as slow "
        "(default: %(default)s)",
    )  # fmt: skip


def flags_of(options: argparse.Namespace) -> dict[str, str]:
    """The settings given on the command line."""
    given = {
        setting: str(getattr(options, name))
        for name, setting in FLAG_SETTINGS.items()
        if getattr(options, name, None) is not None
    }
    for text in options.set:
        name, _, value = text.partition("=")
        given[name.strip()] = value.strip()
    return given


def _config(options: argparse.Namespace) -> Config:
    from baton.runtime.settings.loading import load

    return load(options.config, os.environ, flags_of(options))


def _serve_options(options: argparse.Namespace) -> Any:
    from baton.deploy.serve.plan import ServeOptions

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
    from baton.deploy.serve.serve import serve

    serve(_serve_options(options))


def _demo(options: argparse.Namespace) -> None:
    from baton.deploy.cli.demo import demo

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
    from baton.deploy.host.packages import check_worker_packages

    config = _config(options)
    check_worker_packages(config.worker.device)
    from baton.deploy.processes.worker_process import run_worker
    from baton.deploy.serve.device_defaults import worker_config

    run_worker(
        worker_config(config, options.config, flags_of(options)),
        role=options.role,
        worker_id=options.worker_id,
        model_folder=options.model,
        registry_folder=options.registry,
        token=token,
    )


def _router(options: argparse.Namespace) -> None:
    token = _token()
    from baton.deploy.processes.router_process import run_router

    run_router(
        _config(options),
        model_folder=options.model,
        model_name=options.model_name or options.model.resolve().name,
        registry_folder=options.registry,
        token=token,
        address_file=options.address_file,
    )


def _chat(options: argparse.Namespace) -> None:
    from baton.deploy.cli.chat_session import chat

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
    from baton.deploy.cli.process_list import show

    return show(as_json=options.json)


def _clusters(options: argparse.Namespace) -> list[Cluster]:
    from baton.deploy.cli.orders import cluster_at, live_clusters

    if options.registry is not None:
        return [cluster_at(options.registry, _token(), _config(options).security)]
    return live_clusters(options.instance)


def _drain(options: argparse.Namespace) -> None:
    from baton.deploy.cli.orders import drain

    drain(options.worker, _clusters(options))


def _role(options: argparse.Namespace) -> None:
    from baton.deploy.cli.orders import change_role

    change_role(options.worker, options.role, _clusters(options))


def _doctor(options: argparse.Namespace) -> int:
    from baton.deploy.cli.doctor import doctor

    return doctor(_config(options), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
