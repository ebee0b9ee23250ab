"""The start and the end of our processes: their limit on open files, and how they report an error.

A process that ends on an error prints one clear message and has an exit code, without a
traceback. A child of `baton serve` also writes the message to the file that its supervisor named,
so that `baton serve` can print it. Errors that are not ours keep their traceback: they are bugs.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from baton.deploy.host.instance import ERROR_KEY, write_private
from baton.deploy.host.restarts import CONFIG_EXIT, UNHEALTHY_EXIT
from baton.runtime.errors import BatonError, ConfigError, DeviceLost, EngineError

MAX_OPEN_FILES = 1 << 20  # where the hard limit is infinite
INTERRUPTED_EXIT = 130  # as a shell reports SIGINT


def raise_open_file_limit() -> int:
    """Raise the soft limit as far as the hard limit allows, and return it.

    A shell's usual soft limit of 1024 lies below a router's `max_connections`: it would run out of
    descriptors, and leave clients waiting, before it could refuse them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def end_at_sigterm() -> None:
    """Let SIGTERM end a process that still loads, until its event loop handles the signal. The
    kernel ignores it otherwise for the first process of a container."""
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def run_to_exit_code(action: Callable[[], int | None]) -> int:
    """Run `action` and return the process's exit code."""
    try:
        return action() or 0
    except BatonError as error:
        print(f"baton: error: {error}", file=sys.stderr)
        _report_to_supervisor(str(error))
        if isinstance(error, ConfigError):
            return CONFIG_EXIT
        return UNHEALTHY_EXIT if isinstance(error, EngineError | DeviceLost) else 1
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT


def _report_to_supervisor(message: str) -> None:
    """Write the error file, if the folder still exists and the disk has room. Otherwise the exit
    code alone must be enough."""
    if ERROR_KEY in os.environ:
        try:
            write_private(Path(os.environ[ERROR_KEY]), message)
        except OSError as error:
            print(f"baton: error file not written for the supervisor: {error}", file=sys.stderr)
