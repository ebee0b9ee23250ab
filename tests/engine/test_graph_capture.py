"""What a graph captures reads nothing on the host: a GPU would refuse it, or worse, freeze it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.json_values import JsonObject
from tests.support.small_models import Reference

pytestmark = pytest.mark.nightly  # under the interpreter, one story of a minute

STORY = Path(__file__).with_name("capture_story.py")
# A window, norms of queries and keys; a soft cap, quantised products; experts; quantised experts
# and latent attention. For each its quantisation, and a part of the name of its own kernel.
MODELS = {
    "qwen3-window": ("none", "rotate_write_kernel"),
    "gemma2": ("int4", "_product"),
    "qwen3-moe": ("none", "_grouped"),
    "deepseek-v3-small": ("int8", "latent"),
}


@pytest.fixture(scope="module")
def captured(references: Callable[[str], Reference]) -> JsonObject:
    """What one process prints of all models: most of its time goes into its imports."""
    line = [sys.executable, "-P", str(STORY)]
    for name, (quantization, _) in MODELS.items():
        line += ["--model", str(references(name).folder), quantization]
    done = subprocess.run(line, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: JsonObject = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_capture_reads_nothing_on_the_host(captured: JsonObject, name: str) -> None:
    """Over plain KV and codes, ordinary and deterministic."""
    found, (_, kernel) = captured["kernels"][list(MODELS).index(name)], MODELS[name]
    assert len(found) == 4
    for pool in ("auto", "int8"):
        assert any(kernel in each for each in found[pool]), found


def test_a_read_on_the_host_is_found(captured: JsonObject) -> None:
    assert "meta tensors" in captured["host_read"]
