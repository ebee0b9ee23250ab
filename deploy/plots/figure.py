"""Figures for `--plot`: panels that several commands draw, and the file.

matplotlib is imported when a plot is asked for, and by nothing else: it is the extra `plot`. The
command checks for it before its work begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from baton.deploy.host.packages import installed
from baton.runtime.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = (6.0, 3.6)
DPI = 120
LINEAR_MS = 1.0
MAX_POINTS = 2000  # of a curve

Panel = Callable[["Axes"], None]


def require_matplotlib() -> None:
    """Raise ConfigError, which names the remedy, if matplotlib is not installed."""
    if not installed("matplotlib"):
        raise ConfigError("--plot needs matplotlib: pip install 'baton-serve[plot]'")


def write_figure(path: Path, title: str, panels: Sequence[Panel], columns: int = 2) -> None:
    """Draw the panels in rows, and write them as a PNG. Raises ConfigError."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / columns)
    width, height = PANEL_INCHES
    figure: Figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    figure.suptitle(title)
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        axes.grid(alpha=0.3)
        panel(axes)
    try:
        figure.savefig(path, dpi=DPI, format="png")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def distribution(
    title: str, values_s: Mapping[str, tuple[Sequence[float], Sequence[int] | None]], limit_s: float
) -> Panel:
    """Return a panel of cumulative distributions: seconds, each with its count or each once.
    `limit_s`: an objective; infinite: none."""

    def draw(axes: Axes) -> None:
        axes.set(title=title, xlabel="ms", ylabel="share", ylim=(0, 1.02))
        smallest_ms, largest_ms = math.inf, 0.0
        for name, (seconds, counts) in values_s.items():
            if len(seconds):
                x_ms, shares = cumulative(seconds, counts)
                axes.step(x_ms, shares, where="post", label=name)
                smallest_ms = min(smallest_ms, float(x_ms[0]))
                largest_ms = max(largest_ms, float(x_ms[-1]))
        if smallest_ms > 0:
            axes.set_xscale("log")
        elif largest_ms > LINEAR_MS:  # a logarithmic axis has no 0
            axes.set_xscale("symlog", linthresh=LINEAR_MS)
            axes.set_xlim(left=0)
        if not math.isinf(limit_s):
            axes.axvline(1000 * limit_s, color="black", linestyle="--", label="objective")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right")

    return draw


def times_over_time(
    title: str, points: Mapping[str, tuple[Sequence[float], Sequence[float]]], limit_s: float
) -> Panel:
    """Return a panel of points: when a request was sent, in seconds, and its time."""

    def draw(axes: Axes) -> None:
        axes.set(title=title, xlabel="s", ylabel="ms")
        for name, (sent_s, seconds) in points.items():
            axes.plot(sent_s, 1000 * np.asarray(seconds), ".", markersize=3, label=name)
        if not math.isinf(limit_s):
            axes.axhline(1000 * limit_s, color="black", linestyle="--", label="objective")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper right")

    return draw


def cumulative(
    seconds: Sequence[float], counts: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return milliseconds in ascending order, at most MAX_POINTS, and the share of the counts that
    is at most that."""
    values = np.asarray(seconds, np.float64)
    weights = np.ones(len(values)) if counts is None else np.asarray(counts, np.float64)
    order = np.argsort(values, kind="stable")
    shares = np.cumsum(weights[order]) / weights.sum()
    kept = np.unique(
        np.linspace(0, len(order) - 1, min(len(order), MAX_POINTS)).round().astype(int)
    )
    return 1000 * values[order][kept], shares[kept]
