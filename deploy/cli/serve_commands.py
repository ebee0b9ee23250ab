"""The commands that start a whole instance on this host: `serve` and `demo`."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

from baton.deploy.cli.arguments import add_command, add_registry, add_settings, config_of, flags_of
from baton.deploy.serve.flag_values import (
    FLAG_SETTINGS,
    MAX_PORT,
    MAX_WORKERS,
    NO_ADMIN,
    SETTING_OPTIONS,
    default_of,
    proposer,
    seconds,
    setting,
    whole,
)

if TYPE_CHECKING:
    from baton.deploy.serve.plan import ServeOptions

QUESTION = "Tell me a happy story about the fox Rosa, a red kite and the garden."
ANSWER_TOKENS = 48


def add_serve_commands(commands: Any) -> None:
    _add_serve(commands, "serve", "start a router and workers on this host", _serve)
    demo = _add_serve(
        commands, "demo", "serve, and show the first answer", _demo, placement="disaggregated"
    )
    demo.add_argument("--once", action="store_true", help="exit after the first answer")


def _add_serve(
    commands: Any, name: str, text: str, run: Any, placement: str | None = None
) -> argparse.ArgumentParser:
    command = add_command(commands, name, text, run)
    command.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a model folder or a hub id (owner/name[@revision]); none: the embedded model",
    )  # fmt: skip
    command.add_argument(
        "--prefill", type=whole(0, MAX_WORKERS), default=1, metavar="N",
        help=f"prefill workers, at most {MAX_WORKERS} (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--decode", type=whole(1, MAX_WORKERS), default=1, metavar="N",
        help=f"decode workers, 1 to {MAX_WORKERS}: only they emit tokens (default: %(default)s)",
    )  # fmt: skip
    for role in ("prefill", "decode"):
        command.add_argument(
            f"--{role}-tp", type=setting("worker.tp"), metavar="N",
            help=f"processes of each {role} worker's model, where they differ from --tp",
        )  # fmt: skip
        command.add_argument(
            f"--{role}-ep", type=setting("worker.ep"), metavar="N",
            help=f"groups of experts of each {role} worker, where they differ from --ep",
        )  # fmt: skip
        command.add_argument(
            f"--{role}-kv-dtype", type=setting("pool.kv_dtype"), metavar="{auto,int8,fp8_e4m3}",
            help=f"dtype of each {role} worker's KV, where it differs from --kv-dtype",
        )  # fmt: skip
    for option, metavar, meaning in SETTING_OPTIONS:
        setting_name = FLAG_SETTINGS[option.removeprefix("--").replace("-", "_")]
        own = placement if option == "--placement" else None
        default = f"{setting_name}; default: {own}" if own else default_of(setting_name)
        command.add_argument(
            option, type=proposer if option == "--speculate" else setting(setting_name),
            metavar=metavar, default=own, help=f"{meaning} ({default})",
        )  # fmt: skip
    command.add_argument(
        "--deterministic", action="store_const", const="true",
        help="a request's tokens depend on nothing else that is served (worker.deterministic)",
    )  # fmt: skip
    _add_launcher(command)
    command.add_argument(
        "--admin-port", type=whole(NO_ADMIN, MAX_PORT), default=0, metavar="PORT",
        help="port of the console, on 127.0.0.1; -1: none, 0: the system chooses one "
        "(default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--start-timeout", type=seconds(86_400), default=600.0, metavar="SECONDS",
        help="time limit until all workers are ready (default: %(default)g)",
    )  # fmt: skip
    add_settings(command)
    return command


def _add_launcher(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--launcher", choices=("ray", "process"), default="ray",
        help="what starts and restarts the workers; process: no Ray (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--ray-address", default=os.environ.get("RAY_ADDRESS", ""), metavar="ADDRESS",
        help="a running Ray (default: RAY_ADDRESS, else a local one is started)",
    )  # fmt: skip
    add_registry(
        command,
        "with --ray-address: redis://HOST:PORT, where workers register that start on all nodes of "
        "that Ray (registry.location); none: they start on this host",
    )
    command.add_argument(
        "--pack", action="store_true",
        help="with --registry: fill the nodes of Ray one by one (default: spread workers)",
    )  # fmt: skip


def _serve_options(options: argparse.Namespace) -> ServeOptions:
    from baton.deploy.serve.plan import ServeOptions

    return ServeOptions(
        config=config_of(options),
        prefill=options.prefill,
        decode=options.decode,
        prefill_tp=options.prefill_tp and int(options.prefill_tp),
        decode_tp=options.decode_tp and int(options.decode_tp),
        prefill_ep=options.prefill_ep and int(options.prefill_ep),
        decode_ep=options.decode_ep and int(options.decode_ep),
        prefill_kv_dtype=options.prefill_kv_dtype,
        decode_kv_dtype=options.decode_kv_dtype,
        model=options.model,
        config_file=options.config,
        flags=flags_of(options),
        launcher=options.launcher,
        ray_address=options.ray_address,
        pack=options.pack,
        start_timeout_s=options.start_timeout,
        admin_port=options.admin_port,
    )


def _serve(options: argparse.Namespace) -> None:
    from baton.deploy.serve.serve import serve

    serve(_serve_options(options))


def _demo(options: argparse.Namespace) -> None:
    demo(_serve_options(options), once=options.once)


def demo(options: ServeOptions, *, once: bool) -> None:
    """Serve, ask one question, print the answer as it comes, and serve on unless `once`. Raises
    BatonError without an answer."""
    from baton.deploy.cli.chat import ChatClient, printable
    from baton.deploy.serve.serve import serve
    from baton.runtime.errors import BatonError

    def ask(url: str, model: str) -> bool:
        print(f"\nyou    {QUESTION}\n{model}  ", end="", flush=True)
        began = time.monotonic()
        first_s = None
        stream = ChatClient(url).stream(
            model, [{"role": "user", "content": QUESTION}], max_tokens=ANSWER_TOKENS, seed=1
        )
        for piece in stream:
            first_s = first_s or time.monotonic() - began
            print(printable(piece), end="", flush=True)
        if first_s is None:
            raise BatonError("the demonstration's answer is empty")
        took = time.monotonic() - began
        print(f"\n\nFirst token after {first_s:.2f} s, the whole answer after {took:.2f} s.")
        return not once

    serve(options, after_ready=ask)
