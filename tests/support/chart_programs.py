"""`helm` and `kubectl` of this machine: `helm template` renders for tests/support/chart.py where it
is on PATH, and a cluster that `kubectl` reaches validates objects. Neither changes a cluster."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import helm_python

TIMEOUT_S = 120.0
_SOURCE = re.compile(r"^---\n# Source: (\S+)\n", re.MULTILINE)


def templated(
    helm: str, folder: Path, values: Mapping[str, object], name: str, namespace: str
) -> dict[str, str]:
    """Return what `helm template` prints, by the template that it comes from. Raises
    helm_python.HelmError with Helm's words."""
    command = [helm, "template", name, str(folder), "--namespace", namespace, "--values", "-"]
    done = _run(command, json.dumps(values))
    if done.returncode:
        raise helm_python.HelmError(done.stderr.strip())
    first, *parts = _SOURCE.split(done.stdout)
    if first.strip():
        raise ValueError(f"{helm} template names no template above: {first[:200]}")
    found: dict[str, str] = {}
    for path, text in zip(parts[::2], parts[1::2], strict=True):
        found[path] = f"{found.get(path, '')}---\n{text}"
    return found


def reaches_cluster(kubectl: str) -> bool:
    """Whether the server that kubectl is configured for answers."""
    return _run([kubectl, "version", "--request-timeout=5s"]).returncode == 0


def dry_run(kubectl: str, documents: Sequence[Mapping[str, object]]) -> None:
    """Raise ValueError with the words of kubectl if its cluster's schemas refuse a document."""
    command = [kubectl, "apply", "--dry-run=client", "--validate=strict", "--filename", "-"]
    items = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
    done = _run(command, json.dumps(items))
    if done.returncode:
        raise ValueError(done.stderr.strip())


def _run(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
