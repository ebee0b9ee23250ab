"""`baton bench --plot`: what the clients saw, and when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from baton.deploy.bench.answer import Measurement
from baton.deploy.bench.bench_report import BenchReport, measured_requests
from baton.deploy.bench.bench_run import BenchResult
from baton.deploy.plots.figure import Panel, distribution, times_over_time, write_figure
from baton.simulation.capacity.layout import Objectives

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_bench(
    path: Path, result: BenchResult, report: BenchReport, objectives: Objectives
) -> None:
    """Write a PNG of a run. Raises ConfigError."""
    measured = measured_requests(result)
    finished = [each for each in measured if each.error is None]
    start_s = min((each.intended_s for each in measured), default=0.0)
    streamed = [each for each in finished if each.chunks]
    first = {
        "TTFT": ([each.ttft_s for each in streamed], None),
        "E2E": ([each.e2e_s for each in finished], None),
    }
    gaps = {
        "between chunks": ([gap for each in streamed for gap in each.gaps_s], None),
        "TPOT": ([each.mean_gap_s for each in streamed if each.tokens > 1], None),
    }
    sent = {
        "TTFT": (
            [each.intended_s - start_s for each in streamed],
            [each.ttft_s for each in streamed],
        ),
        "failed": _failures(measured, start_s),
    }
    panels = [
        distribution("Time to first token, and to the end", first, objectives.ttft_s),
        distribution("Time between tokens", gaps, objectives.itl_s),
        times_over_time("By intended send time", sent, objectives.ttft_s),
        _under_way(measured, start_s),
    ]
    write_figure(path, f"{report.server}, {report.model}: {report.load}", panels)


def _failures(measured: list[Measurement], start_s: float) -> tuple[list[float], list[float]]:
    failed = [each for each in measured if each.error is not None]
    return [each.intended_s - start_s for each in failed], [each.e2e_s for each in failed]


def under_way(measured: list[Measurement], start_s: float) -> tuple[list[float], list[int]]:
    """Return the seconds at which the number of requests under way changes, and that number."""
    changes = sorted(
        [(each.intended_s - start_s, 1) for each in measured]
        + [(each.end_s - start_s, -1) for each in measured]
    )
    times_s, counts, now = [0.0], [0], 0
    for time_s, change in changes:
        now += change
        times_s.append(time_s)
        counts.append(now)
    return times_s, counts


def _under_way(measured: list[Measurement], start_s: float) -> Panel:
    def draw(axes: Axes) -> None:
        axes.set(title="Requests under way", xlabel="s")
        axes.step(*under_way(measured, start_s), where="post")
        axes.set_ylim(bottom=0)

    return draw
