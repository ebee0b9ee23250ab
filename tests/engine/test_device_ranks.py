"""A model over ranks with pools of their own, as on GPUs: by Triton's interpreter and gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.device_ranks.device_loading import Stalls, counted_stalls


@pytest.mark.timeout(300)  # four interpreters share two cores
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("qwen3-window-small", []),
        pytest.param("qwen3-window", ["--sized", "--kv-dtype=int8"], marks=pytest.mark.nightly),
        pytest.param("deepseek-v3", ["--ep=2"], marks=pytest.mark.nightly),
        pytest.param("mixtral", ["--ranks=4"], marks=pytest.mark.nightly),
        pytest.param("qwen3-window-small", ["--deterministic"], marks=pytest.mark.nightly),
    ],
)
def test_ranks_on_devices_equal_one_process(references, name, more):
    """Three sequences, in chunks and by graphs; a copied block; handoffs; a rank stopped, then
    killed. Windows, and KV in eight bits, over a pool that was sized after a first build; latents,
    experts in two groups; more ranks than KV heads; bits that do not depend on the batch, proved at
    the start."""
    script = Path(__file__).with_name("device_ranks_story.py")
    done = subprocess.run(
        [sys.executable, "-P", script, references(name).folder, "--device=cpu", "--steps=2", *more],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == [True] * 7


def test_only_a_rank_that_reads_nothing_stalls() -> None:
    """One that is behind and reads on does not, nor one that has read all."""
    stalls: Stalls = {}
    for poll in range(30):
        stalls = counted_stalls(stalls, {1: 7, 2: poll} | ({3: 5} if poll % 10 else {}))
    assert stalls == {1: (7, 29), 2: (29, 0), 3: (5, 8)}
