"""The commands beside serving: `chat`, `explain`, `trace`, `faults` and `doctor`."""

from __future__ import annotations

import argparse
import os
from typing import Any, Literal

from baton.deploy.cli.arguments import add_command, add_registry, add_settings, config_of
from baton.deploy.serve.flag_values import new_file, whole
from baton.runtime.errors import ConfigError


def add_doctor(commands: Any) -> None:
    command = add_command(
        commands, "doctor", "check this machine, and say how to fix what it lacks", _doctor
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    add_registry(command, "the registry of a cluster, which is checked too; needs BATON_TOKEN")
    add_settings(command)


def add_chat(commands: Any) -> None:
    text = "chat with a running server; BATON_API_KEY is the API key, if the server needs one"
    command = add_command(commands, "chat", text, _chat)
    command.add_argument(
        "--url", help="URL of the server (default: the instance that runs on this host)"
    )
    command.add_argument(
        "--model", metavar="NAME", help="the model (default: the first that the server lists)"
    )
    command.add_argument("--system", metavar="TEXT", help="the system message (default: none)")


def add_explain(commands: Any) -> None:
    text = "how a running server would place a request; BATON_API_KEY as for `baton chat`"
    command = add_command(commands, "explain", text, _explain)
    command.add_argument("file", metavar="FILE", help="the request's JSON body; - for stdin")
    command.add_argument(
        "--url", help="URL of the server (default: the instance that runs on this host)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def add_trace(commands: Any) -> None:
    text = "where the time of a request went; BATON_API_KEY as for `baton chat`"
    command = add_command(commands, "trace", text, _trace)
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("id", nargs="?", metavar="ID", help="the X-Request-Id of its answer")
    what.add_argument("--slow", action="store_true", help="list the slowest of the last requests")
    what.add_argument("--latest", action="store_true", help="list the last requests")
    command.add_argument(
        "--count", type=whole(1, 1000), default=20, metavar="N",
        help="how many the list has (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--url", help="URL of the server (default: the instance that runs on this host)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def add_faults(commands: Any) -> None:
    text = "the fault lab: simulated fleets under faults, each promise checked"
    command = add_command(commands, "faults", text, _faults)
    command.add_argument(
        "--seeds", type=whole(1, 1 << 40), default=2000, metavar="N",
        help="number of simulated fleets, one for each seed (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--from", type=whole(0, 1 << 40), default=0, metavar="S", dest="first",
        help="the first seed (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--jobs", type=whole(1, 1024), default=1, metavar="J",
        help="number of processes, at most one for each core (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--json", type=new_file, metavar="FILE", help="write the report to this file"
    )
    command.add_argument(
        "--keep", metavar="EVENTS", help="keep only these events of each seed, for example 0,3,7"
    )
    command.add_argument(
        "--mutation",
        metavar="NAME",
        help="break the product in this way; the lab must detect it",
    )
    command.add_argument(
        "--engine", choices=("hash", "model"), default="hash",
        help="what fleets compute: hashes, or the embedded model, about 100 times slower "
        "(default: %(default)s)",
    )  # fmt: skip


def _chat(options: argparse.Namespace) -> None:
    from baton.deploy.cli.chat_session import chat

    chat(options.url, options.model, os.environ.get("BATON_API_KEY"), options.system)


def _explain(options: argparse.Namespace) -> None:
    from baton.deploy.cli.explain import explain

    api_key = os.environ.get("BATON_API_KEY")
    explain(options.file, options.url, api_key, as_json=options.json)


def _trace(options: argparse.Namespace) -> None:
    from baton.deploy.cli.trace import show_trace, show_traces

    api_key = os.environ.get("BATON_API_KEY")
    if options.slow or options.latest:
        which: Literal["slow", "latest"] = "slow" if options.slow else "latest"
        show_traces(which, options.count, options.url, api_key, as_json=options.json)
    else:
        show_trace(options.id, options.url, api_key, as_json=options.json)


def _faults(options: argparse.Namespace) -> int:
    from baton.deploy.host.packages import installed

    if not installed("redis"):
        raise ConfigError(
            "the fault lab simulates a Redis registry and needs redis: "
            "pip install 'baton-serve[redis]'"
        )
    from baton.models.embedded import embedded_model
    from baton.simulation.fault_report import faults

    keep = None
    if options.keep is not None:
        events = options.keep.split(",")
        if not all(event.isdecimal() for event in events):
            raise ConfigError(f"--keep {options.keep}: give event numbers, for example 0,3,7")
        keep = [int(event) for event in events]
    return faults(
        options.first,
        options.seeds,
        jobs=options.jobs,
        json_file=options.json,
        mutation=options.mutation,
        keep=keep,
        model=embedded_model() if options.engine == "model" else None,
    )


def _doctor(options: argparse.Namespace) -> int:
    from baton.deploy.cli.doctor import doctor

    return doctor(config_of(options), as_json=options.json)
