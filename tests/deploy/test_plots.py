"""`--plot` of bench, simulate and tune: the curves are those of the report, the file is a PNG."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from baton.deploy.bench.answer import Measurement
from baton.deploy.cli import main
from baton.deploy.host.restarts import CONFIG_EXIT
from baton.deploy.plots.bench_plot import under_way
from baton.deploy.plots.figure import MAX_POINTS, cumulative, distribution, times_over_time
from baton.planner.traces import TraceRequest
from tests.support.openai_stub import Script, openai_stub
from tests.support.timing_files import write_timing

TRAFFIC = "requests=40,rate=5,prompt=lognormal:900:0.7,output=exponential:60"
BENCH = ["--concurrency", "1", "--limit", "6", "--output", "constant:3", "--slo", "ttft=1s,itl=1s"]


def drawn_colors(file: Path) -> int:
    """How many colours a PNG has: an empty figure has few."""
    with Image.open(file) as image:
        assert image.format == "PNG" and image.width > 800 and image.height > 300
        colors = image.convert("RGB").getcolors(maxcolors=1 << 24)
    assert colors is not None
    return len(colors)


def test_bench_draws_its_run(tmp_path: Path) -> None:
    file = tmp_path / "bench.png"
    scripts = [Script(0.01, 0.01), Script(break_after=1), Script(0.02, 0.0)]
    with openai_stub(lambda number, body: scripts[number % 3]) as stub:
        assert main.main(["bench", "--url", stub.url, *BENCH, "--plot", str(file)]) == 0
    assert drawn_colors(file) > 100


@pytest.mark.nightly  # `test_bench_draws_its_run` draws in `make test`
def test_simulate_and_tune_draw_their_reports(tmp_path: Path) -> None:
    timing, file = write_timing(tmp_path), tmp_path / "plot.png"
    words = ["--traffic", TRAFFIC, "--timing", str(timing), "--slo", "ttft=60s,itl=9s"]
    words += ["--plot", str(file)]
    assert main.main(["simulate", *words, "--prefill", "1", "--decode", "2"]) == 0
    assert drawn_colors(file) > 100
    file.unlink()
    assert main.main(["tune", *words, "--gpus", "2"]) == 0
    assert drawn_colors(file) > 50


def test_a_plot_without_matplotlib_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And before the work: there is no server and no timing model."""
    monkeypatch.setattr(
        "baton.deploy.plots.figure.installed", lambda module: module != "matplotlib"
    )
    plot = ["--plot", str(tmp_path / "x.png")]
    traffic = ["--traffic", TRAFFIC, "--timing", "/no/timing.json"]
    for command in (
        ["bench", "--url", "http://127.0.0.1:9", *BENCH, *plot],
        ["simulate", *traffic, "--colocated", "1", *plot],
        ["tune", *traffic, "--gpus", "2", "--slo", "ttft=1s", *plot],
    ):
        assert main.main(command) == CONFIG_EXIT
        assert "--plot needs matplotlib: pip install 'baton-serve[plot]'" in capsys.readouterr().err


def test_a_plot_is_a_png(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["bench", *BENCH, "--plot", "x.jpg"])
    assert ended.value.code == 2
    assert "--plot: 'x.jpg': give a file whose name ends with .png" in capsys.readouterr().err


def test_a_distribution_ends_at_all() -> None:
    axes = Figure().add_subplot()
    curves = {"a": ([0.3, 0.1, 0.2], [1, 2, 1]), "none": ([], None)}
    distribution("t", curves, limit_s=0.25)(axes)
    (curve, objective) = axes.lines
    assert list(curve.get_xdata()) == [100.0, 200.0, 300.0]
    assert list(curve.get_ydata()) == [0.5, 0.75, 1.0]
    assert list(objective.get_xdata()) == [250.0, 250.0]


def test_a_long_distribution_keeps_its_ends() -> None:
    x_ms, shares = cumulative([n / 1e6 for n in range(50_000)], None)
    assert len(x_ms) <= MAX_POINTS and (x_ms[0], x_ms[-1]) == (0.0, pytest.approx(49.999))
    assert shares[-1] == 1.0


def test_points_over_time_have_no_line_without_an_objective() -> None:
    axes = Figure().add_subplot()
    times_over_time("t", {"a": ([1.0, 2.0], [0.5, 0.25])}, math.inf)(axes)
    (points,) = axes.lines
    assert list(points.get_ydata()) == [500.0, 250.0]


def test_requests_under_way_are_counted_from_their_intended_time() -> None:
    def measured(intended_s: float, end_s: float) -> Measurement:
        return Measurement(TraceRequest(0.0, 1, 1), False, intended_s, end_s=end_s)

    times_s, counts = under_way([measured(10.0, 13.0), measured(11.0, 12.0)], 10.0)
    assert (times_s, counts) == ([0.0, 0.0, 1.0, 2.0, 3.0], [0, 1, 2, 1, 0])
