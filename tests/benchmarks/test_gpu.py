"""`make gpu` without a GPU: its parts tell what became of them, and its arithmetic is right."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from benchmarks import gpu
from benchmarks.figures import report
from benchmarks.gpu_parts import draws as gpu_draws
from benchmarks.gpu_parts import models as gpu_models
from benchmarks.gpu_parts import small_model as gpu_small_model
from benchmarks.gpu_parts import speed as gpu_speed
from tests.support.gpu_dry_run import gpu_dry_run
from tests.support.waiting import wait_until

FOLDER = Path(__file__).resolve().parents[2]
GIVEN = argparse.Namespace(dry_run=True, reference=None)


def test_a_dry_run_writes_figures_table_and_log(tmp_path: Path) -> None:
    file, table = tmp_path / "gpu.json", tmp_path / "gpu.md"
    gpu_dry_run("ceilings", "draws", results=tmp_path)
    part, draws = json.loads(file.read_text())["parts"]
    assert part["state"] == draws["state"] == "passed"
    assert [each["name"] for each in part["figures"]] == ["copy_gb_per_s", "matrix_tflops"]
    assert draws["figures"][-1]["name"] == "draw_us_3x199_over_sort"
    assert "| ceilings | copy_gb_per_s |" in table.read_text()
    assert (tmp_path / "gpu.log").read_text() == "== ceilings\n== draws\n"
    assert len(list(tmp_path.iterdir())) == 3


def test_what_is_known_is_written_before_the_next_part_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that whatever ends the run, at whatever moment, leaves it."""
    results, seen = tmp_path / "results", []

    def run(parts, limit_s, device, folder, given, before, log):
        if seen:
            known = json.loads((results / "gpu.json").read_text())["parts"]
            assert [each["part"] for each in known] == seen
            assert all(f"| {part} |" in (results / "gpu.md").read_text() for part in seen)
        seen.extend(parts)
        return [gpu.Outcome(part, "passed", 1.0, []) for part in parts]

    monkeypatch.setattr(gpu, "run_parts", run)
    monkeypatch.setattr(sys, "argv", ["gpu", f"--results={results}"])
    assert gpu.main() == 0 and seen == [*gpu.ORDER]


def test_the_time_before_the_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def run(parts, limit_s, *_):
        limits.append(limit_s)
        return []

    monkeypatch.setattr(gpu, "run_parts", run)
    for ago_s in (0.0, 100.0):
        monkeypatch.setattr(sys, "argv", ["gpu", f"--begun={time.time() - ago_s}"])
        assert gpu.main() == 0
    first, later = (
        limits[: len(gpu.part_groups(gpu.ORDER))],
        limits[len(gpu.part_groups(gpu.ORDER)) :],
    )
    assert first[0] == later[0] == gpu.SMOKE_S
    assert all(
        0 < a - b - 100 < 5 or a - b == pytest.approx(100, abs=5)
        for a, b in zip(first[1:], later[1:], strict=True)
    )


def test_a_run_that_is_stopped_leaves_its_log_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("import time; print('begun', flush=True); time.sleep(600)")
    code = (
        "import sys; from pathlib import Path; from benchmarks import gpu\n"
        f"gpu.TESTS, gpu.SCRIPTS = Path({str(tmp_path)!r}), "
        "{'kernel_parity': ['part.py'], 'fixed_parity': ['part.py']}\n"
        "sys.argv[1:] = ['--results', sys.argv[1], '--only', 'kernel_parity', 'fixed_parity']\n"
        "gpu.main()"
    )
    line = [sys.executable, "-c", code, tmp_path / "results"]
    with subprocess.Popen(line, cwd=FOLDER, stderr=subprocess.DEVNULL) as run:
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
        wait_until(lambda: len(children.read_text().split()) == 2)
        pids = children.read_text().split()
        # the parts have to print: their logs are named only when the run has ended
        time.sleep(1.0)
        run.terminate()
        run.wait(60)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert (tmp_path / "results" / "gpu.log").read_text().count("begun") == 2


def test_a_smoke_test_launches_captures_and_reads() -> None:
    given = gpu_speed.Given(torch.device("cpu"), True)
    assert given.dry and gpu.part_groups(["draws", "smoke"])[0] == ("smoke",)
    table = gpu_dry_run("smoke")
    for name in ("smoke_launch_s", "smoke_capture_s", "smoke_read_s"):
        assert f"| smoke | {name} |" in table


@pytest.mark.parametrize(
    ("code", "state", "said"),
    [
        ("raise SystemExit(3)", "failed", "exit code 3"),
        ("import time; time.sleep(60)", "timed out", "after 2 s"),
        ("pass", "passed", ""),
    ],
)
def test_the_outcome_of_a_part_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, state: str, said: str
) -> None:
    script = tmp_path / "part.py"
    script.write_text(code)
    monkeypatch.setattr(gpu, "TESTS", tmp_path)
    monkeypatch.setattr(gpu, "SCRIPTS", {"kernel_parity": ["part.py"]})
    limit_s = 2.0 if state == "timed out" else 60.0
    (found,) = gpu.run_parts(
        ("kernel_parity",), limit_s, "cpu", tmp_path, GIVEN, [], tmp_path / "log"
    )
    assert (found.state, found.said) == (state, said)
    assert found.seconds < 50


def test_parallel_parts_are_reported_separately(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that hangs takes nothing from the others, nor do they wait for it."""
    for name, code in (("a", "print('of a')"), ("b", "1 / 0"), ("c", "while True: ...")):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setattr(gpu, "TESTS", tmp_path)
    monkeypatch.setattr(gpu, "SCRIPTS", {name: [f"{name}.py"] for name in "abc"})
    found = {
        each.part: each
        for each in gpu.run_parts(tuple("abc"), 4.0, "cpu", tmp_path, GIVEN, [], tmp_path / "log")
    }
    states = {name: each.state for name, each in found.items()}
    assert states == {"a": "passed", "b": "failed", "c": "timed out"}
    assert found["a"].seconds < found["c"].seconds
    said = capfd.readouterr().out
    assert said.index("of a") < said.index("-- a: passed") and "ZeroDivisionError" in said


def test_figures_of_a_part_that_is_killed_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, figure = tmp_path / "a.json", {"name": "n", "value": 1.0, "unit": "", "beside": ""}
    made = json.dumps({"figures": [figure | {"holds": None}]})
    (tmp_path / "a.py").write_text(f"open({str(out)!r}, 'w').write({made!r})\nwhile True: ...")
    monkeypatch.setattr(gpu, "TESTS", tmp_path)
    monkeypatch.setattr(gpu, "SCRIPTS", {"a": ["a.py"]})
    (found,) = gpu.run_parts(("a",), 4.0, "cpu", tmp_path, GIVEN, [], tmp_path / "log")
    assert (found.state, found.figures[0]["name"]) == ("timed out", "n")
    assert "| a | | timed out | after 4 s | |" in gpu.figures_table([found])
    assert "| a | n | 1 |" in gpu.figures_table([found])


@pytest.mark.parametrize(
    ("value", "code", "skipped", "count"),
    [
        (lambda given: 1 / 0, 1, None, 1),
        (lambda given: importlib.import_module("no_such.part"), 0, "no_such is not installed", 1),
        (lambda given: importlib.import_module("benchmarks.no_such_part"), 1, None, 1),
        (
            lambda given: given.ceiling("copy_gb_per_s"),
            0,
            "the ceiling copy_gb_per_s was not measured",
            1,
        ),
        (lambda given: 2.0, 0, None, 2),
    ],
)
def test_figures_are_written_as_they_come(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    value: Callable[..., object],
    code: int,
    skipped: str | None,
    count: int,
) -> None:
    out, names = tmp_path / "part.json", []

    def figures(given):
        yield report.Figure("first", 1.0)
        names.extend(each["name"] for each in json.loads(out.read_text())["figures"])
        yield report.Figure("second", value(given))

    monkeypatch.setattr(gpu, "part_function", lambda part: figures)
    assert gpu.run_child(argparse.Namespace(part="x", out=out, known="{}", **vars(GIVEN))) == code
    found = json.loads(out.read_text())
    assert names == ["first"] and found.get("skipped") == skipped
    assert len(found["figures"]) == count
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("good", [True, False])
def test_every_small_model_goes_through_its_story(
    monkeypatch: pytest.MonkeyPatch, good: bool
) -> None:
    lines = []

    def run(line, **_):
        assert (Path(line[3]) / "config.json").exists()
        lines.append(line)
        return argparse.Namespace(returncode=int(not good), stdout=json.dumps([True, good]))

    monkeypatch.setattr(subprocess, "run", run)
    given = gpu_speed.Given(torch.device("cpu"), True)
    if good:
        (figure,) = gpu.engine_token_parity(given)
        assert figure.value == 2 * len(lines)
        assert [line[6] for line in lines] == [f"--kv-dtype={x}" for x in ("auto", "auto", "int8")]
    else:
        with pytest.raises(RuntimeError, match="equal to the CPU's: .*False"):
            gpu.engine_token_parity(given)


def test_limits_leave_room_within_nine_minutes() -> None:
    assert gpu.TOTAL_S + gpu.KILL_S < 540
    assert gpu.TOTAL_S - gpu.SMOKE_S - gpu.needed_after_s(gpu.PARITY, gpu.ORDER) >= 120


def test_each_part_may_take_what_those_after_it_leave() -> None:
    groups = gpu.part_groups(gpu.ORDER)
    assert groups[0] == ("smoke",) and groups[1] == gpu.PARITY
    assert [part for group in groups for part in group] == [*gpu.ORDER]
    for group, after in itertools.pairwise(groups[2:]):
        needed = gpu.needed_after_s(group, gpu.ORDER) - gpu.needed_after_s(after, gpu.ORDER)
        assert needed == gpu.LIMITS[after[0]]
    assert gpu.needed_after_s(groups[-1], gpu.ORDER) == 0
    assert gpu.part_groups(["draws", "codes_parity"]) == [("codes_parity",), ("draws",)]
    assert gpu.needed_after_s(("codes_parity",), ["draws", "codes_parity"]) == gpu.LIMITS["draws"]


def test_every_part_has_a_function_or_a_script() -> None:
    for part in gpu.ORDER:
        assert part in gpu.SCRIPTS or callable(gpu.part_function(part))


def test_a_draw_by_sorting_keeps_to_the_rules() -> None:
    draws = gpu_draws
    logits = torch.randn(400, 50).sort(dim=-1, descending=True).values
    params = replace(draws.USUAL, top_k=7, top_p=0.6)
    masses = (logits[:, :7] / params.temperature).softmax(dim=-1)
    kept = (masses.cumsum(dim=-1) - masses < params.top_p).sum(dim=-1)
    drawn = draws.sorted_draw(logits, params)
    assert (drawn < kept).all() and drawn.bincount().count_nonzero() > 1
    assert (draws.sorted_draw(logits, replace(params, top_k=1)) == 0).all()


def test_the_table_says_what_failed_and_what_holds() -> None:
    figures = [report.asdict(report.at_least("a", 1.0, 2.0, "x"))]
    table = gpu.figures_table(
        [
            gpu.Outcome("one", "passed", 1.0, figures),
            gpu.Outcome("two", "skipped", 1.0, [], "nixl is not installed"),
        ]
    )
    assert "| one | a | 1 x | limit: at least 2 | no |" in table
    assert "| two | | skipped | nixl is not installed | |" in table


def test_shapes_have_the_sizes_of_their_models() -> None:
    models = gpu_models
    llama, qwen = models.SHAPES["llama-8b"], models.SHAPES["qwen3-0.6b"]
    assert llama.matrix_parameters + 2 * llama.hidden * llama.vocab == pytest.approx(
        8.03e9, rel=1e-3
    )
    assert qwen.matrix_parameters + qwen.hidden * qwen.vocab == pytest.approx(0.596e9, rel=1e-3)
    assert llama.kv_bytes == 128 << 10
    assert llama.prefill_flops(2048) == pytest.approx(
        2 * llama.matrix_parameters * 2048 + 32 * 4 * 4096 * 2048**2 / 2
    )
    assert llama.decode_bytes(64, 4096) == pytest.approx(15e9 + 34.36e9, rel=1e-2)


def test_steps_name_the_rows_that_feed_them() -> None:
    models = gpu_models
    first, then = (models.decode_step(3, 40 + n, 64, fed=bool(n)) for n in range(2))
    assert [item.feed for item in first.slices] == [None] * 3
    assert [item.feed for item in then.slices] == [0, 1, 2]
    assert list(then.slices[2].blocks) == [8, 9, 10, 11]
    assert then.slices[2].start == 41 and then.slices[2].draws[0].position == 42


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_small_model_loads(tmp_path: Path, qk_norm: bool) -> None:
    gpu_small_model.write_small_model(tmp_path / "model", qk_norm)
    runner = build_runner(tmp_path / "model", EngineOptions(blocks=8))
    assert runner.spec.qk_norm is qk_norm


def test_figures_of_others_are_skipped_without_a_folder() -> None:
    speed = gpu_speed
    given = speed.Given(device=None, dry=False)
    assert speed.reference_seconds(given, 1, 1, 4095) == {}
    with pytest.raises(speed.Skipped, match="copy_gb_per_s was not measured"):
        given.ceiling("copy_gb_per_s")
