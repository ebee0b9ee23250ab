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
    """Return the commands by which the notes let a user wait for the release and ask it."""
    shown = re.findall(r"^  ((?:kubectl|KEY=|curl)(?:.|\\\n)+?[^\\])$", notes, re.MULTILINE)
    assert [each.split()[0][:7] for each in shown] == ["kubectl", "kubectl", "KEY=$(k", "curl"]
    return list(shown)


def first_streamed_token_s(machine: Machine, logs: Callable[[], str]) -> float:
    """Install the release, and ask it as its notes say; return the time from the first key to the
    first streamed token. Raises AssertionError with `logs` if none comes, or no end."""
    began_s = time.monotonic()
    *prepared, asked = commands_of_notes(machine.typed(documented("helm install")))
    port = prepared[1].removesuffix("&").split()[-1]
    lines, took_s = [], 0.0
    script = "\n".join([*prepared, listening(port), asked])
    with machine.shell(script) as process:
        assert process.stdout is not None
        for line in process.stdout:  # to the end of the stream
            lines.append(line)
            if not took_s and line.startswith("data: {") and re.search(r'"content":\s*"[^"]', line):
                took_s = time.monotonic() - began_s
        process.wait(ENDED_S)
    if not took_s or "data: [DONE]\n" not in lines:
        raise AssertionError("".join(lines) + logs())
    return took_s
