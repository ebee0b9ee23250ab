"""A worker on a GPU loads neither numba nor llvmlite, which weigh more than all else it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.machine_speed import slowness
from tests.support.small_models import Reference

STORY = Path(__file__).with_name("device_story.py")
BLOCKED = """
import runpy, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

for name in ("numba", "llvmlite"):
    sys.modules[name] = None  # as absent for who asks whether it is there
sys.meta_path.insert(0, Blocked())
"""
PROCESS = """
import baton.deploy.cli.main
import baton.deploy.cli.doctor
import baton.deploy.processes.gpu_preflight
import baton.deploy.processes.worker_process
import baton.engine.execution.cuda_runner
import baton.engine.execution.device_runner
import baton.engine.triton.device_checksums
import baton.engine.execution.gpu_loading
import baton.engine.triton.experts
import baton.engine.triton.quantized_experts
import torch
from baton.deploy.processes.pool_memory import device_pool

pool = device_pool(torch.arange(4096, dtype=torch.uint8).view(4, 1024), 2)
from baton.kv_transfer.checksum import reference
wanted = reference(torch.arange(4096, dtype=torch.uint8).view(4, 1024).numpy(), [2, 0], [5, 6], 2)
assert (pool.checksums([2, 0], [5, 6]) == wanted).all()
print("all")
"""


def run_blocked(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-P", "-c", BLOCKED + program, *map(str, arguments)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110 * slowness(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_gpu_workers_process_starts_without_numba() -> None:
    """Its modules, those of its tools, and the sums of its pool's blocks."""
    assert run_blocked(PROCESS).endswith("all\n")


@pytest.mark.nightly
def test_a_gpu_workers_steps_need_no_numba(references: Callable[[str], Reference]) -> None:
    """Its tokens are those of the CPU, too; its pool was sized after a first build."""
    program = f"sys.argv[1:] = sys.argv[1:]\nrunpy.run_path({str(STORY)!r}, run_name='__main__')"
    folder = references("qwen3-window").folder
    found = run_blocked(program, folder, "--device=cpu", "--steps=2", "--sized")
    assert json.loads(found) == [True] * 3


def test_what_is_blocked_here_is_what_a_cpu_worker_needs() -> None:
    program = "try:\n    import baton.kv_transfer.checksum_numba\n"
    program += "except ImportError as error:\n    print(error.name)"
    assert run_blocked(program) == "numba\n"
