"""The commands and flags that `baton` has, as its own parser knows them.

argparse has no public way to ask a parser for its actions: only this module uses its private ones.
"""

from __future__ import annotations

import argparse

from baton.deploy.cli import main


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, by name."""
    return _commands_of(main.parser())


def flags_of(command: argparse.ArgumentParser) -> set[str]:
    """Return the flags of a command and of the commands below it."""
    found = set(command._option_string_actions)
    return found.union(*(flags_of(each) for each in _commands_of(command).values()))


def helps_of(command: argparse.ArgumentParser) -> dict[str, str | None]:
    """Return the help text of each flag and argument of a command, by its destination."""
    return {action.dest: action.help for action in command._actions}


def _commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.update(action.choices)
    return found
