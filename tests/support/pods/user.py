"""A user with kubectl and helm (programs.py) in a network of their own."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field

from tests.support.operations_page import documented_commands
from tests.support.pods.programs import Programs

TYPED_S = 400.0
# Else the script's output stays open as long as one of them runs.
END_JOBS = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"
FOLDERS = "/usr/local/bin:/usr/bin:/bin:/usr/sbin"


def listening(port: int | str) -> str:
    """Return the line of a script that waits until a port is open which its last job forwards; it
    fails if that job has ended."""
    opened = f"(: < /dev/tcp/127.0.0.1/{port}) 2>/dev/null"
    return f"until {opened}; do kill -0 $! || exit 1; sleep 0.05; done"


@dataclass(slots=True)
class User:
    """`namespace` is one of `ip netns`. `used`: the documented commands that were typed."""

    programs: Programs
    namespace: str
    path: str = FOLDERS
    used: list[str] = field(default_factory=list)

    def shell(self, script: str) -> subprocess.Popen[str]:
        """Start a script on the user's machine. What it leaves in the background ends with it."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "bash", "-ec", f"{END_JOBS}\n{script}"],
            env={"PATH": f"{self.programs.folder}:{self.path}"},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def typed(self, script: str, code: int = 0) -> str:
        """Run a script to its end, and return what it prints."""
        process = self.shell(script)
        text, _ = process.communicate(timeout=TYPED_S)
        assert process.returncode == code, text
        return text

    def command(self, beginning: str, **values: str) -> str:
        """Return the only documented command that begins so, with its placeholders filled in."""
        found = [each for each in documented_commands() if each.startswith(beginning)]
        exact = [each for each in found if each == beginning]
        (text,) = exact or found
        self.used.append(text)
        filled = {"RELEASE": "chat", **values}
        return re.sub(rf"\b({'|'.join(filled)})\b", lambda found: filled[found[0]], text)

    def documented(self, beginning: str, **values: str) -> str:
        """Run that command to its end, and return what it prints."""
        return self.typed(self.command(beginning, **values))
