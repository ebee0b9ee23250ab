"""What a graph captures reads nothing on the host: a GPU would refuse it, or worse, freeze it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STORY = Path(__file__).with_name("capture_story.py")


def run(folder, *more):
    return subprocess.run(
        [sys.executable, "-P", STORY, folder, *more], capture_output=True, text=True, timeout=110
    )


@pytest.mark.parametrize(
    ("name", "more", "kernel"),
    [
        ("qwen3-window", [], "rotate_write_kernel"),
        ("gemma2", ["--quantization=int4"], "_product"),
        ("qwen3-moe", [], "_grouped"),
        ("deepseek-v3-small", ["--quantization=int8"], "latent"),
    ],
)
def test_capture_reads_nothing_on_the_host(references, name, more, kernel):
    """A window, norms of queries and keys; a soft cap, quantised products; experts; quantised
    experts and latent attention. Each over plain KV and codes, ordinary and deterministic."""
    done = run(references(name).folder, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4
    for name in ("auto", "int8"):
        assert any(kernel in each for each in found[name]), found


def test_a_read_on_the_host_is_found(references):
    done = run(references("qwen3").folder, "--host-read")
    assert done.returncode == 1 and "meta tensors" in done.stderr
