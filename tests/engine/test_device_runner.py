"""All that runs on a GPU, put together and run by Triton's interpreter: tokens as on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.device_runner import refuse_unsupported
from baton.engine.spec import read_spec
from baton.runtime.errors import ModelError


@pytest.mark.parametrize("name", ["qwen3-window"])
def test_tokens_are_those_of_the_cpu(references, name):
    """Query and key norms, and a window."""
    script = Path(__file__).with_name("device_story.py")
    done = subprocess.run(
        [sys.executable, "-P", script, references(name).folder, "--device=cpu", "--steps=2"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == [True] * 3


@pytest.mark.parametrize(
    ("name", "told"), [("mixtral", "experts"), ("deepseek-v2", "latent attention")]
)
def test_what_has_no_kernels_is_refused_by_name(references, name, told):
    with pytest.raises(ModelError, match=f"{told}.*worker.device"):
        refuse_unsupported(read_spec(references(name).folder))
