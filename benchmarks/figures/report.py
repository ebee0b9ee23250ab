"""The common part of every benchmark: its command line, the machine it ran on, its figures.

A figure stands beside what it is to be judged by: a limit, a peer's figure, or the machine's
own. Printed as a table, and written as JSON with `--json FILE`. Holds no state.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "nixl", "grpcio", "numpy")


@dataclass(frozen=True, slots=True)
class Figure:
    """`beside` is what to read it against; `holds` is None where there is no limit."""

    name: str
    value: float
    unit: str = ""
    beside: str = ""
    holds: bool | None = None


def at_most(name: str, value: float, limit: float, unit: str = "") -> Figure:
    return Figure(name, value, unit, f"limit: at most {limit:g}", value <= limit)


def at_least(name: str, value: float, limit: float, unit: str = "") -> Figure:
    return Figure(name, value, unit, f"limit: at least {limit:g}", value >= limit)


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with `--json FILE`; the benchmark adds its own options."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return made


def report(
    figures: Sequence[Figure], json_file: Path | None = None, notes: Sequence[str] = ()
) -> None:
    """Print command, machine, figures and notes; write `json_file` if given."""
    content = {
        "command": command(),
        "machine": machine(),
        "figures": [asdict(figure) for figure in figures],
        "notes": list(notes),
    }
    print(f"$ {content['command']}")
    print("  ".join(f"{name} {value}" for name, value in machine().items()))
    width = max((len(figure.name) for figure in figures), default=0)
    for figure in figures:
        verdict = {None: "", True: "  holds", False: "  DOES NOT HOLD"}[figure.holds]
        value = f"{figure.value:>12.4g} {figure.unit:<6}"
        print(f"{figure.name:<{width}} {value} {figure.beside}{verdict}".rstrip())
    for note in notes:
        print(note)
    if json_file is not None:
        json_file.write_text(json.dumps(content, indent=2) + "\n")


def progress(text: str) -> None:
    """Say on stderr what a long benchmark does now, with the time of day and the load."""
    print(f"{time.strftime('%H:%M:%S')}  {text} (load {os.getloadavg()[0]:.1f})", file=sys.stderr)


def command() -> str:
    """The command line as one can type it again."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    start = f"-m {module.name}" if module is not None else sys.argv[0]
    return " ".join(["python", start, *sys.argv[1:]])


def machine() -> dict[str, str]:
    """Processor, cores, memory, and the versions that matter."""
    found = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": str(os.cpu_count()),
        "memory": f"{_memory_gib():.0f}GiB",
        "load": f"{os.getloadavg()[0]:.1f}",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""  # not Linux
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
