"""The results of a benchmark's run, for the tests that read its figures."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Reported(NamedTuple):
    """The file that a benchmark wrote, the figures in it by their names, and what it printed."""

    written: dict[str, Any]
    figures: dict[str, Any]
    printed: str


class Measure(Protocol):
    """Run `python -m benchmarks.<name> --quick` with these flags, and return what it reports."""

    def __call__(self, name: str, *flags: str, timeout_s: float = ...) -> Reported: ...
