"""All that runs on a GPU, put together and run by Triton's interpreter: tokens as on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.small_models import Reference

# Whole runners are nightly, here and in test_gpu_imports.py. `make test` has the kernels of the
# deterministic mode (test_attention_triton.py, test_invariant_weights.py) and its proof
# (test_determinism_proof.py).
pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("qwen3-window", []),
        ("deepseek-v3", []),
        ("gemma2", ["--sized", "--kv-dtype=int8"]),
    ],
)
def test_tokens_are_those_of_the_cpu(
    references: Callable[[str], Reference], name: str, more: list[str]
) -> None:
    """Query and key norms and a window (test_gpu_imports.py has them over a pool that was sized);
    latent attention and experts; KV in eight bits, with a soft cap."""
    found = reported("device_story.py", references(name).folder, "--steps=2", *more)
    assert found == [True] * 3


@pytest.mark.parametrize(
    ("name", "more", "found"),
    [
        ("qwen3-window-small", ["--ordinary"], 5),
        ("deepseek-v3-small", ["--quantization=int8", "--kv-dtype=fp8_e4m3"], 4),
    ],
)
def test_a_deterministic_runner_verifies_itself_against_the_cpu(
    references: Callable[[str], Reference], name: str, more: list[str], found: int
) -> None:
    """Query and key norms and a window; quantised experts, and latent attention over codes. The
    proof is that of each start, on fewer tokens: whole, in pieces, beside others, as single tokens,
    and by graphs. The ordinary runner fails it."""
    held = reported("deterministic_story.py", references(name).folder, *more)
    assert all(held.values()) and len(held) == found, held


def reported(script, folder, *more):
    done = subprocess.run(
        [sys.executable, "-P", Path(__file__).with_name(script), folder, "--device=cpu", *more],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)
