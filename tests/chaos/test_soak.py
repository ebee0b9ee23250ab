"""A soak's arithmetic, and a short one on real processes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from baton.runtime import process_memory
from chaos.soak import CANNOT_TELL, Growth, Series, exit_code, growth, own_bytes, states

ROOT = Path(__file__).resolve().parents[2]


def line(mb_h: float, *, noise: float = 0.0, warm: float = 0.0) -> list[tuple[float, float]]:
    rng = random.Random(3)
    return [
        (float(minute), 600 + (50 if minute < warm else 0) + mb_h * minute / 60
         + rng.gauss(0, noise))
        for minute in range(120)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mb_h", "state"), [(0.0, "holds"), (0.9, "holds"), (1.2, "GROWS"), (-3.0, "holds")]
)
def test_a_slope_is_reported_in_mb_an_hour(mb_h: float, state: str) -> None:
    found = growth(line(mb_h), 0.0)
    assert found.mb_h == pytest.approx(mb_h, abs=1e-6)
    assert found.error_mb_h == pytest.approx(0.0, abs=1e-6)
    assert found.state == state


def test_a_run_that_is_too_short_to_tell_says_so() -> None:
    assert Growth(0.5, 2.0).state == Growth(3.0, 2.0).state == "cannot tell"
    assert Growth(3.0, 0.9).state == "GROWS" and Growth(0.5, 0.2).state == "holds"


def test_noise_is_an_error_bound_and_clear_growth_remains() -> None:
    flat, steep = growth(line(0.0, noise=2.0), 0.0), growth(line(10.0, noise=2.0), 0.0)
    assert 0.1 < flat.error_mb_h < 1.0 and abs(flat.mb_h) < 3 * flat.error_mb_h
    assert flat.state != "GROWS" and steep.state == "GROWS"


def test_warm_up_does_not_count() -> None:
    points = line(0.5, warm=60)
    assert growth(points, 0.0).mb_h < -10
    assert growth(points, 60.0).mb_h == pytest.approx(0.5, abs=1e-6)
    with pytest.raises(ValueError, match="let it run longer"):
        growth(points, 118.0)


@pytest.mark.parametrize(
    ("every_minutes", "state"), [(300, "holds"), (90, "holds"), (20, "GROWS"), (5, "GROWS")]
)
def test_one_step_is_no_growth_and_many_are(every_minutes: int, state: str) -> None:
    """Of 1 MB, where it steps once, and of a slope of 3 MB an hour where it does so often."""
    each = 1.0 if every_minutes > 60 else every_minutes / 20
    points = [(m, held + each * ((m + 60) // every_minutes)) for m, held in line(0.0, noise=0.01)]
    assert growth(points, 0.0).state == state


def series(*, memory_mb_h: float = 0.0, noise: float = 0.0, **late: float) -> Series:
    """What a process held in two hours; `late`: of what it has more in the second one."""
    counts = {
        kind: [
            (float(m), 20.0 + m % 3 + (late.get(kind, 0.0) if m >= 60 else 0)) for m in range(120)
        ]
        for kind in ("descriptors", "tasks")
    }
    return Series(memory_mb=line(memory_mb_h, noise=noise), **counts)


@pytest.mark.parametrize("kind", ["descriptors", "tasks"])
def test_more_descriptors_or_tasks_than_after_warm_up_are_growth(kind: str) -> None:
    level = {"memory_mb": "holds", "descriptors": "holds", "tasks": "holds"}
    assert states(series(), 0.0) == states(series(**{kind: 5.0}), 0.0) == level
    assert states(series(**{kind: 6.0}), 0.0) == level | {kind: "GROWS"}
    assert states(series(**{kind: 6.0}), 61.0) == level  # it was so after warm-up already


def test_the_exit_code_distinguishes_growth_from_no_finding() -> None:
    assert exit_code(["holds"], wrong=0, left=0) == 0
    assert exit_code(["holds", "cannot tell"], wrong=0, left=0) == CANNOT_TELL == 3
    assert exit_code(["cannot tell", "GROWS"], wrong=0, left=0) == 1
    assert exit_code(["holds"], wrong=1, left=0) == exit_code(["cannot tell"], wrong=0, left=1) == 1


# It goes on when it is told to: nothing else in it takes memory, or gives some back.
TAKES_THEN_MAPS = """
import mmap, os, sys

print(flush=True), sys.stdin.readline()
taken = bytearray(os.urandom(64 << 20))
print(flush=True), sys.stdin.readline()
with open(sys.executable, "rb") as opened:
    pages = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
assert sum(pages[::4096])
print(flush=True), sys.stdin.readline()
"""


def test_the_memory_of_a_process_is_what_it_has_taken_itself() -> None:
    command = [sys.executable, "-c", TAKES_THEN_MAPS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    found = []
    with subprocess.Popen(command, text=True, **pipes) as child:
        for _ in range(3):
            child.stdout.readline()
            found.append(own_bytes(child.pid))
            print(file=child.stdin, flush=True)
    assert child.returncode == 0
    before, taken, mapped = found
    assert taken - before == pytest.approx(64 << 20, rel=0.1)
    assert mapped - taken < 1 << 20


def test_a_short_soak_samples_every_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chaos.soak", "--hours=0.003", "--fleet=1,0,1"]
        + [f"--folder={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert "answers: {'right'" in done.stdout, done.stdout + done.stderr
    written = json.loads((tmp_path / "soak.json").read_text())
    assert set(written["answers"]) == {"right"} and written["left"] == {}
    assert set(written["series"]) == set(written["growth"]) == {"router", "decode-0"}
    for series in written["series"].values():
        assert len(series["memory_mb"]) >= 4
        assert min(figure for _, figure in series["memory_mb"]) > 10
        assert min(figure for _, figure in series["python_blocks"]) > 100_000
        assert process_memory.HEAP_IS_REPORTED is (
            min(figure for _, figure in series["heap_mb"]) > 5
        )
        assert min(figure for _, figure in series["tasks"]) >= 1
        assert min(figure for _, figure in series["descriptors"]) > 5
    every = [state for kinds in written["states"].values() for state in kinds.values()]
    assert len(every) == 6 and done.returncode == exit_code(every, wrong=0, left=0)
    assert ("cannot tell whether" in done.stdout) is (done.returncode == CANNOT_TELL)
    assert written["series"]["router"]["blocks"] == []
    assert len(written["series"]["decode-0"]["blocks"]) >= 4
    for kind in ("memory_mb", "heap_mb", "python_blocks", "descriptors", "tasks", "blocks"):
        assert (tmp_path / f"soak-{kind}.png").read_bytes()[:4] == b"\x89PNG"
