"""A newcomer's installation of the chart: what docs/kubernetes.md and the notes of `helm install`
say, typed line by line, in pods of namespaces or in a real cluster."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from typing import Protocol

from tests.support.operations_page import documented_commands
from tests.support.pods.user import listening

ENDED_S = 60.0


class Machine(Protocol):
    """A newcomer's machine, with helm, kubectl and curl on its path."""

    def shell(self, script: str) -> subprocess.Popen[str]:
        """Start a script, with one output stream. What it leaves in the background ends with it."""

    def typed(self, script: str) -> str:
        """Run a script to its end, and return what it prints. Raises AssertionError if it fails."""


def documented(beginning: str) -> str:
    """Return the only documented command that begins so."""
    (found,) = [each for each in documented_commands() if each.startswith(beginning)]
    return found


def commands_of_notes(notes: str) -> list[str]:
    """Return the commands by which the notes let a user wait for the release and ask it; by TLS
    they read its certificate before."""
    pattern = r"^  ((?:kubectl|KEY=|curl)(?:.|\\\n)+?[^\\])$"
    found = re.findall(pattern, notes, re.MULTILINE)
    shown = [each for each in found if " create secret " not in each]
    read = ["kubectl"] if "https://" in shown[-1] else []
    words = [each.split()[0][:7] for each in shown]
    assert words == ["kubectl", "kubectl", "KEY=$(k", *read, "curl"]
    return shown


def first_streamed_token_s(machine: Machine, logs: Callable[[], str]) -> float:
    """Install the release, and ask it as its notes say; return the time from the first key to the
    first streamed token. Raises what `ask_as_noted` does."""
    began_s = time.monotonic()
    return ask_as_noted(machine, machine.typed(documented("helm install")), logs) - began_s


def ask_as_noted(machine: Machine, notes: str, logs: Callable[[], str]) -> float:
    """Ask a release as these notes of it say; return the monotonic time of the first streamed
    token. Raises AssertionError with `logs` if none comes, or no end."""
    *prepared, asked = commands_of_notes(notes)
    port = prepared[1].removesuffix("&").split()[-1]
    lines, first_s = [], 0.0
    script = "\n".join([*prepared, listening(port), asked])
    with machine.shell(script) as process:
        assert process.stdout is not None
        for line in process.stdout:  # to the end of the stream
            lines.append(line)
            if (
                not first_s
                and line.startswith("data: {")
                and re.search(r'"content":\s*"[^"]', line)
            ):
                first_s = time.monotonic()
        process.wait(ENDED_S)
    if not first_s or "data: [DONE]\n" not in lines:
        raise AssertionError("".join(lines) + logs())
    return first_s
