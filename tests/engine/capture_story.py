"""Capture of decode steps on tensors without numbers: what would read one on the host raises.

    python -P tests/engine/capture_story.py --model FOLDER int8 [--model FOLDER none ...]

Each FOLDER holds a model, and the word after it names its quantisation. Kernels are recorded, not
launched; everything else of a step runs as on a GPU, over meta tensors, for pools of plain numbers
and of codes, ordinary and deterministic. Prints a JSON object: `kernels`, for each model in turn
those that its graphs would hold, by pool; `host_read`, the error of a capture that reads a number
on the host.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.engine.checkpoint.weights import load_weights
from baton.engine.execution import device_runner as device_runners
from baton.engine.execution.graph_device import HostDevice
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KV_QUANTS
from baton.engine.spec.model_spec import read_spec
from baton.engine.triton.matrices import TritonMatrices

META = torch.device("meta")


class MetaDevice(HostDevice):
    """Runs what is captured once, and notes that it was a capture."""

    def __init__(self) -> None:
        self.torch_device = META


def on_meta(found: object) -> Any:
    """The same weights without their numbers."""
    if isinstance(found, torch.Tensor):
        return found.to(META)
    if isinstance(found, (tuple, list)):
        return type(found)(on_meta(each) for each in found)
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        values = {
            each.name: on_meta(getattr(found, each.name)) for each in dataclasses.fields(found)
        }
        return dataclasses.replace(found, **values)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", nargs=2, action="append", required=True, metavar=("FOLDER", "QUANTIZATION")
    )
    given = parser.parse_args()
    launched: list[str] = []

    def record(kernel: JITFunction, *_: object, **__: object) -> None:
        launched.append(kernel.fn.__name__)

    JITFunction.run = record
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    device_runners.graph_device = lambda device: MetaDevice()
    models = [(Path(folder), quantization) for folder, quantization in given.model]
    found = {"kernels": [_captured(*model, launched) for model in models], "host_read": ""}
    _plant_host_read()
    try:
        _captured(*models[0], launched)
    except RuntimeError as error:
        found["host_read"] = str(error)
    print(json.dumps(found))


def _captured(folder: Path, quantization: str, launched: list[str]) -> dict[str, list[str]]:
    """Capture the steps of a model over each pool; return the names of the kernels in its graphs,
    which `launched` collects."""
    spec = read_spec(folder)
    matrices = TritonMatrices(torch.device("cpu"))
    loaded = load_weights(folder, spec, torch.bfloat16, matrices, None, quantization)
    weights = on_meta(loaded)
    found = {}
    for kv_dtype in ("auto", "int8"):
        for deterministic in (False, True):
            launched.clear()
            pool = KvPool(spec, 64, 16, torch.bfloat16, META, KV_QUANTS.get(kv_dtype))
            runner = device_runners.device_runner(
                spec,
                weights,
                pool,
                max_context=128,
                max_rows=8,
                buckets=(1, 8),
                deterministic=deterministic,
            )
            assert runner.graphs.buckets == (1, 8)
            name = f"{kv_dtype}{' deterministic' if deterministic else ''}"
            found[name] = sorted(set(launched))
    return found


def _plant_host_read() -> None:
    """A draw that asks on the host whether the logits are finite."""
    draw = device_runners.draw_tokens

    def reading(logits: torch.Tensor, *rest: Any) -> None:
        if bool(logits.isfinite().all()):
            draw(logits, *rest)

    device_runners.draw_tokens = reading


if __name__ == "__main__":
    main()
