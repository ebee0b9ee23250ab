"""The command `baton`: parses the command line and runs one command.

Nothing heavy is imported before a command is chosen, so that `baton --help` is fast. An error ends
as one line and an exit code (process_lifecycle.py).
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any

from baton.deploy.cli.authority_commands import add_authority
from baton.deploy.cli.bench_command import add_bench
from baton.deploy.cli.control_commands import add_control_commands
from baton.deploy.cli.fleet_command import add_fleet
from baton.deploy.cli.planning_commands import add_calibrate, add_simulate, add_tune
from baton.deploy.cli.process_commands import add_process_commands
from baton.deploy.cli.release_commands import add_release
from baton.deploy.cli.serve_commands import add_serve_commands
from baton.deploy.cli.size_command import add_size
from baton.deploy.cli.tool_commands import add_chat, add_doctor, add_explain, add_faults, add_trace
from baton.runtime import tls_version  # noqa: F401  before anything imports grpc

DISTRIBUTION = "baton-serve"
COMMANDS = (
    "serve", "demo", "worker", "router", "fleet", "chat", "explain", "trace", "faults", "ps",
    "drain", "role", "controller", "advise", "cluster", "doctor", "authority", "release",
    "calibrate", "simulate", "tune", "size", "bench",
)  # fmt: skip
EXIT_CODES = (
    "Exit codes: 0 done; 1 failed (ps: nothing runs; doctor: a check failed; faults: a promise was "
    "broken); 2 wrong command line; 3 no layout meets the objectives (tune, size), or too few "
    "requests do (bench); 70 a worker's device failed; 78 wrong setting, model or port; 130 Ctrl-C."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    from baton.deploy.host.process_lifecycle import run_to_exit_code

    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    top = parser()
    _check_command(top, given[0])
    options = top.parse_args(given)
    return run_to_exit_code(lambda: options.run(options))


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="baton",
        description="Serves language models with prefill and decode on separate workers.",
        epilog=EXIT_CODES,
    )
    top.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_serve_commands(commands)
    add_process_commands(commands)
    add_fleet(commands)
    add_chat(commands)
    add_explain(commands)
    add_faults(commands)
    add_trace(commands)
    add_calibrate(commands)
    add_simulate(commands)
    add_tune(commands)
    add_size(commands)
    add_bench(commands)
    add_control_commands(commands)
    add_doctor(commands)
    add_authority(commands)
    add_release(commands)
    return top


def _check_command(top: argparse.ArgumentParser, name: str) -> None:
    """End the process with a suggestion if `name` is not a command."""
    if name.startswith("-") or name in COMMANDS:
        return
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean `baton {near[0]}`?" if near else "`baton --help` lists the commands"
    top.error(f"there is no command {name!r}: {hint}")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from importlib.metadata import version

        print(f"{parser.prog} {version(DISTRIBUTION)}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
