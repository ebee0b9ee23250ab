"""All that runs on a GPU, put together and run by Triton's interpreter: tokens as on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("qwen3-window", ["--sized"]),
        ("deepseek-v3", []),
        ("gemma2", ["--sized", "--kv-dtype=int8"]),
    ],
)
def test_tokens_are_those_of_the_cpu(references, name, more):
    """Query and key norms and a window, over a pool that was sized after a first build; latent
    attention and experts; KV in eight bits, with a soft cap."""
    script = Path(__file__).with_name("device_story.py")
    done = subprocess.run(
        [sys.executable, "-P", script, references(name).folder, "--device=cpu", "--steps=2", *more],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == [True] * 3
