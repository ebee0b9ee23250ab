"""Settings on the command line and the registry, for several commands of `baton`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.deploy.serve.flag_values import (
    FLAG_SETTINGS,
    assignment,
    location,
    proposer_settings,
)

if TYPE_CHECKING:
    from baton.runtime.config import Config

ROLES = ("prefill", "decode")


def add_command(commands: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    return command


def add_settings(command: argparse.ArgumentParser, *, file: bool = True) -> None:
    """Add --set, and --config unless the settings are for other hosts."""
    if file:
        command.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    else:
        command.set_defaults(config=None)
    command.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", type=assignment,
        help="one setting, as runtime/baton.toml lists them with their units and defaults; wins "
        "over file and environment; may be repeated",
    )  # fmt: skip


def add_registry(command: Any, text: str) -> None:
    """Add --registry to a command or a group of options."""
    command.add_argument("--registry", metavar="DIR|URL", type=location, help=text)


def flags_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the settings given on the command line."""
    given = {
        setting: str(getattr(options, name))
        for name, setting in FLAG_SETTINGS.items()
        if getattr(options, name, None) is not None
    }
    if getattr(options, "speculate", None) is not None:
        given.update(proposer_settings(options.speculate))
    for text in options.set:
        name, _, value = text.partition("=")
        given[name.strip()] = value.strip()
    return given


def config_of(options: argparse.Namespace) -> Config:
    """Load the settings of file, environment and command line. Raises ConfigError."""
    from baton.runtime.settings.loading import load

    return load(options.config, os.environ, flags_of(options))
