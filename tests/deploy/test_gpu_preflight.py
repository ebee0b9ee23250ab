"""The preflight on a GPU, as far as a host without one goes: started with its options, refused by
name."""

from __future__ import annotations

import sys

import pytest
import torch

from baton.deploy.processes.gpu_preflight import gpu_mover, on_gpu
from baton.kv_transfer import preflight
from baton.runtime.errors import ConfigError, ReadFailed
from tests.support.machine_speed import slowness

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_both_ends_run_this_module_on_the_same_gpu() -> None:
    ends = on_gpu("cuda:1")
    assert ends.arguments == ("-m", "baton.deploy.processes.gpu_preflight", "--device", "cuda:1")


@no_gpu
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="worker.device is cuda:1"):
        gpu_mover("cuda:1", 2, 64)


@no_gpu
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_cpu_is_refused_with_what_measures_it(device: str) -> None:
    with pytest.raises(ConfigError, match=f"--device is {device}, which is no GPU.*kv_transfer"):
        gpu_mover(device, 2, 64)


@no_gpu
async def test_the_doctor_reports_what_its_children_said() -> None:
    with pytest.raises(ReadFailed, match="(?s)preflight failed.*cuda:0.*sees no CUDA device"):
        await preflight.loopback(0.0, on_gpu("cuda:0"))


def test_loading_it_loads_no_torch() -> None:
    """The doctor must be able to say that torch is missing."""
    import subprocess

    code = "import baton.deploy.cli.transport_check, sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], timeout=250 * slowness())
    assert done.returncode == 0
