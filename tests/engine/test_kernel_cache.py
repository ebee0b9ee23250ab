"""Processes that need the same kernel at once: one compiles it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numba
import numpy as np
import pytest

import baton.engine.cpu.kernel_cache as module
from baton.engine.cpu.compiled import compiled

KERNEL = "def fill(out):\n    for i in range(out.shape[0]):\n        out[i] = i + 1\n"
# Prints how often it compiled the kernel, and how often it found its code.
COMPILES = """
import sys
import threading
from contextlib import suppress
import numpy as np
from kernel import fill
from baton.engine.cpu.compiled import compiled
function = compiled(fill, parallel=True)
print("ready", flush=True)
sys.stdin.readline()
out = np.zeros(3)
function(out)
assert out.tolist() == [1, 2, 3]
print(sum(function.stats.cache_misses.values()), sum(function.stats.cache_hits.values()))
"""


@pytest.mark.nightly
def test_a_kernel_is_compiled_once_by_processes_at_once(tmp_path: Path) -> None:
    """The two have an installation each: of the same content, in other places."""
    processes = []
    for name in ("one", "other"):
        folder = tmp_path / name / "kernels"
        folder.mkdir(parents=True)
        (folder / "kernel.py").write_text(KERNEL)
        environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(folder)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", COMPILES],
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    counts = sorted(process.communicate()[0].strip() for process in processes)
    assert counts == ["0 1", "1 0"]


def held_lock(folder: Path) -> int:
    """Hold the lock of the only kernel under `folder`, as a process that compiles it does."""
    (path,) = folder.rglob("*.lock")
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_a_stopped_process_delays_others_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(out):
        out[0] = 7

    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    compiled(fill)(np.zeros(1))
    descriptor = held_lock(tmp_path)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.05)
    try:
        function = compiled(fill)
        out = np.zeros(1, dtype=np.int64)  # other types: not compiled yet
        function(out)
    finally:
        os.close(descriptor)
    assert out.tolist() == [7]
    assert sum(function.stats.cache_misses.values()) == 1


def test_without_locks_kernels_are_compiled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that has none, or beside the lock file of another account."""

    def fill(out):
        out[0] = 5

    def no_lock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", no_lock)
    out = np.zeros(1)
    compiled(fill)(out)
    assert out.tolist() == [5]


def test_a_failed_compilation_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(out):
        out[0] = out.no_such_field

    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    with pytest.raises(numba.TypingError):
        compiled(wrong)(np.zeros(1))
    (path,) = tmp_path.rglob("*.lock")
    with open(path, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is held


def test_one_thread_at_a_time_may_hold_a_kernels_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release of one thread would take the lock of another away."""

    def fill(out):
        out[0] = 3

    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    meeting, met = threading.Barrier(2, timeout=0.3), []
    compiles = module.KernelCache(fill).released_after(lambda: met.append(meeting.wait()))

    def compile_once():
        with suppress(threading.BrokenBarrierError):
            compiles()

    threads = [threading.Thread(target=compile_once) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == []
