"""How our processes end on an error: one clear message, an exit code, no traceback.

A child of `baton serve` also leaves its message in the file that its keeper named, so that
`baton serve` can say it. Errors that are not ours keep their traceback: they are bugs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from baton.deploy.host.instance import ERROR_KEY, write_private
from baton.deploy.host.restarts import CONFIG_EXIT, ILL_EXIT
from baton.runtime.errors import BatonError, ConfigError, DeviceLost, EngineError

INTERRUPTED = 130  # as a shell reports SIGINT


def exiting(action: Callable[[], int | None]) -> int:
    """Run `action` and answer the process's exit code."""
    try:
        return action() or 0
    except BatonError as error:
        print(f"baton: error: {error}", file=sys.stderr)
        _leave(str(error))
        if isinstance(error, ConfigError):
            return CONFIG_EXIT
        return ILL_EXIT if isinstance(error, EngineError | DeviceLost) else 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _leave(message: str) -> None:
    """For the keeper; its folder may be gone or full, and the exit code must say enough then."""
    if ERROR_KEY in os.environ:
        try:
            write_private(Path(os.environ[ERROR_KEY]), message)
        except OSError as error:
            print(f"baton: the message was not left for the keeper: {error}", file=sys.stderr)
