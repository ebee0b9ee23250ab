"""The phases of `Serving.run`, one at a time.

`run` claims an instance, starts its jobs and returns when all have ended, which takes seconds and
real processes. Its phases are private, since their order is the promise of `run`. A test of what
one phase says, refuses or survives plays that phase here, and only here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from baton.deploy.host.instance import Instance
from baton.deploy.serve.model_source import ModelSource
from baton.deploy.serve.process_launcher import Launcher
from baton.deploy.serve.serve import AfterReady, Serving


class EndingInstance(Protocol):
    """The part of an `Instance` that the last phase uses."""

    folder: Path
    instance_id: str

    def end_job(self, name: str, hurried: Callable[[], bool]) -> None: ...

    def end(self, hurried: Callable[[], bool], sweep: Callable[[], None]) -> None: ...


def prepare(serving: Serving, instance: Instance, model: ModelSource) -> Launcher:
    """Write the jobs, certificates and keys; return the launcher."""
    return serving._prepare(instance, model)


def announce(serving: Serving, url: str, model: ModelSource, folder: Path) -> None:
    """Say that requests can be served at `url`."""
    serving._announce(url, model, folder)


def watch(serving: Serving, instance: Instance, launcher: Launcher) -> None:
    """Watch the jobs until the serving is stopped or one is given up."""
    serving._watch(instance, launcher)


def end(serving: Serving, instance: EndingInstance) -> None:
    """End the jobs, the router first."""
    serving._end(instance)  # type: ignore[arg-type] # it has all that is called


def start_after_ready(
    serving: Serving, after_ready: AfterReady, url: str, model: ModelSource
) -> None:
    """Start the thread that runs `after_ready`."""
    serving._afterwards(after_ready, url, model)


def stop_state(serving: Serving) -> tuple[bool, bool]:
    """Return whether the serving stops, and whether its jobs then cut open requests off."""
    return serving._stopping, serving._hurried
