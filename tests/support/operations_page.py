"""The commands of docs/operations.md and docs/kubernetes.md, as an operator would type them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (ROOT / "docs" / "operations.md", ROOT / "docs" / "kubernetes.md")
PROGRAMS = (
    "baton", "curl", "dmesg", "docker", "helm", "journalctl", "kubectl", "make", "systemctl",
)  # fmt: skip
_INLINE = re.compile(r"`([^`\n]+)`")
_FENCE = re.compile(r"^```(?:bash)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def documented_commands() -> list[str]:
    """Return the commands of both pages."""
    return commands("\n".join(page.read_text() for page in PAGES))


def commands(text: str) -> list[str]:
    """Return the commands of a page once each, in order: whole lines of fenced blocks (after a
    `$`, if the block shows output too), and code in sentences that begins with a program."""
    found = []
    for block in _FENCE.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        shown = [line for line in lines if line.startswith("$ ")]
        found += [line.removeprefix("$ ") for line in shown or lines]
    found += _INLINE.findall(_FENCE.sub("", text))
    kept = [" ".join(each.split()) for each in found]
    return list(dict.fromkeys(each for each in kept if each.split()[:1] and _is_command(each)))


def _is_command(text: str) -> bool:
    program, _, rest = text.partition(" ")
    return program in PROGRAMS and bool(rest or program == "dmesg")


def arguments(command: str, **values: str) -> list[str]:
    """Return the words of a command with its placeholders (HOST, WORKER) filled in."""
    for name, value in values.items():
        command = re.sub(rf"\b{name}\b", value.replace("\\", r"\\"), command)
    return command.split()
