"""`--plot` of `baton simulate` and `baton tune`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.deploy.plots.figure import Panel, distribution, times_over_time, write_figure
from baton.simulation.capacity.capacity_fleet import CapacityFleet
from baton.simulation.capacity.capacity_report import CapacityReport
from baton.simulation.capacity.layout import Objectives
from baton.simulation.capacity.sensitivity import Sensitivity
from baton.simulation.capacity.tuning import Advice, Search

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LAYOUTS = 16  # the best, of a ranking


def plot_simulation(
    path: Path, fleet: CapacityFleet, report: CapacityReport, objectives: Objectives
) -> None:
    """Write a PNG of a simulated fleet: distributions, and utilisation over time. Raises
    ConfigError."""
    finished = [record for record in fleet.records if record.refused is None]
    ttfts = [record.ttft_s for record in finished]
    arrivals = [record.request.arrived_s for record in finished]
    ends = [record.end_s - record.request.arrived_s for record in finished]
    means = [record.mean_gap_s for record in finished if record.tokens > 1]
    gaps = {"between tokens": (fleet.gaps.seconds, fleet.gaps.counts), "mean": (means, None)}
    panels = [
        distribution(
            "Time to first token, and to the end",
            {"TTFT": (ttfts, None), "E2E": (ends, None)},
            objectives.ttft_s,
        ),
        distribution("Time between tokens, and its mean of a request", gaps, objectives.itl_s),
        _use(report),
        times_over_time("TTFT by arrival", {"TTFT": (arrivals, ttfts)}, objectives.ttft_s),
    ]
    write_figure(path, f"{report.layout}, timing: {report.timing}", panels)


def plot_tuning(
    path: Path, found: Sequence[Advice], changes: Sequence[Sensitivity], search: Search
) -> None:
    """Write a PNG of a search: the layouts with their ranges, and what changes would do. Raises
    ConfigError."""
    panels = [_ranking(found[:MAX_LAYOUTS], search), _sensitivities(found[0], changes)]
    write_figure(path, f"{search.gpus} GPUs", panels)


def _use(report: CapacityReport) -> Panel:
    def draw(axes: Axes) -> None:
        axes.set(title="Share of the time in steps", xlabel="s", ylim=(0, 1.05))
        for role, use in report.roles.items():
            times_s = [use.window_s * window for window in range(len(use.over_time))]
            axes.step(times_s, use.over_time, where="post", label=f"{role} ({use.workers})")
        axes.legend(loc="lower right")

    return draw


def _ranking(found: Sequence[Advice], search: Search) -> Panel:
    def draw(axes: Axes) -> None:
        shares = [advice.report.good_share for advice in found]
        rows = range(len(found))
        axes.barh(rows, shares, color="tab:blue", alpha=0.8)
        for row, advice in zip(rows, found, strict=True):
            if advice.low is not None and advice.high is not None:
                share = advice.report.good_share
                error = [[share - advice.low], [advice.high - share]]
                axes.errorbar(share, row, xerr=error, color="black", capsize=3)
        axes.axvline(search.attainment, color="black", linestyle="--", label="wanted")
        axes.set_yticks(rows, [_name(advice) for advice in found], fontsize="small")
        axes.invert_yaxis()
        axes.set(title="Requests that meet the objectives", xlabel="share", xlim=(0, 1.02))
        axes.legend(loc="lower right")

    return draw


def _sensitivities(best: Advice, changes: Sequence[Sensitivity]) -> Panel:
    def draw(axes: Axes) -> None:
        axes.set(title=f"{best.report.layout}: change of goodput", xlabel="%")
        values = [100 * (each.goodput_change or 0.0) for each in changes]
        colors = ["tab:green" if value >= 0 else "tab:red" for value in values]
        axes.barh(range(len(changes)), values, color=colors, alpha=0.8)
        axes.axvline(0, color="black", linewidth=0.8)
        names = [f"{each.change}: {each.good_share:.1%} good" for each in changes]
        axes.set_yticks(range(len(changes)), names, fontsize="small")
        axes.invert_yaxis()

    return draw


def _name(advice: Advice) -> str:
    layout = advice.layout
    chunk = layout.local_chunk_tokens if layout.colocated else layout.chunk_tokens
    parts = [advice.report.layout]
    if layout.gpus_per_worker > 1:
        parts.append(f"{layout.gpus_per_worker} GPUs each")
    if not layout.colocated and advice.candidate.placement != "auto":
        parts.append("all prompts on prefill workers")
    return ", ".join([*parts, f"chunk {chunk}", f"batch {layout.max_sequences}"])
