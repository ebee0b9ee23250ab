"""The engine runs with torch, numpy and safetensors alone, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.machine_speed import slowness
from tests.support.small_models import Reference

PROGRAM = """
import sys
from pathlib import Path


class Refuse:
    names = {"numba", "triton", "transformers", "grpc", "redis", "ray", "nixl", "fastapi", "google"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"refused: {name}", name=name)
        return None


sys.meta_path.insert(0, Refuse())
from baton.engine.scheduling.batch import Draw, SamplingParams, Slice, StepBatch
from baton.engine.checkpoint.fingerprint import model_fingerprint
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner

folder = Path(sys.argv[1])
assert len(model_fingerprint(folder)) == 32
runner = build_runner(folder, EngineOptions(blocks=4, block_size=8, backend="torch"))
out = []
tokens, start = [5, 6, 7], 0
while len(out) < 5:
    draw = Draw(0, start + len(tokens), SamplingParams(temperature=0.0))
    result = runner.run(StepBatch((Slice(tokens, start, [2, 0], (draw,)),)))
    start, tokens = start + len(tokens), [result.drawn[0][0].token]
    out += tokens
print(out)
others = {name for name in sys.modules if name.startswith("baton.")}
bad = [n for n in others if not n.startswith(("baton.engine", "baton.runtime"))]
assert not bad, bad
"""


def test_engine_needs_little(qwen3: Reference) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(qwen3.folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110 * slowness(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(qwen3.greedy([5, 6, 7], 5))
