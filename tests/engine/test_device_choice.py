"""The device that a model runs on, by what torch says is there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from baton.engine.execution.device_choice import chosen_device, device_label
from baton.runtime.errors import ConfigError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let torch see so many."""

    def see(count):
        monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"GPU {device.index}")

    return see


@pytest.mark.parametrize(
    ("name", "count", "chosen"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 0, "cpu"),
        ("cpu", 2, "cpu"),
        ("cuda", 2, "cuda:0"),
        ("cuda:0", 1, "cuda:0"),
        ("cuda:3", 4, "cuda:3"),
    ],
)
def test_names(gpus: Callable[[int], None], name: str, count: int, chosen: str) -> None:
    gpus(count)
    assert chosen_device(name) == torch.device(chosen)


def test_a_cpu_is_chosen_without_a_look_at_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def look():
        raise AssertionError("asked for a GPU")

    monkeypatch.setattr("torch.cuda.is_available", look)
    assert chosen_device("cpu").type == "cpu"


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:5"])
def test_a_gpu_where_there_is_none(gpus: Callable[[int], None], name: str) -> None:
    gpus(0)
    with pytest.raises(
        ConfigError, match=rf"worker.device is {name}: torch .* no CUDA .* give cpu"
    ):
        chosen_device(name)


def test_a_gpu_beyond_those_that_are_there(gpus: Callable[[int], None]) -> None:
    gpus(2)
    with pytest.raises(
        ConfigError, match="cuda:2: torch sees 2 CUDA devices here, cuda:0 to cuda:1"
    ):
        chosen_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:0x", "CPU", ""])
def test_an_unknown_name(name: str) -> None:
    with pytest.raises(ConfigError, match="worker.device is .*: give auto, cpu, cuda, or cuda:N"):
        chosen_device(name)


def test_labels(gpus: Callable[[int], None]) -> None:
    gpus(2)
    assert device_label(torch.device("cpu")) == "cpu"
    assert device_label(torch.device("cuda", 1)) == "cuda:1 (GPU 1)"
