"""How many GPUs there are for workers: torch is asked, by a child, and only where it can know."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.deploy.host import gpus
from baton.deploy.host.gpus import built_for_cuda, has_driver, visible_gpus
from baton.runtime.errors import ConfigError
from tests.support.machine_speed import slowness


def never() -> bool:
    return False


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A torch for CUDA that sees two; callers are counted."""
    questions: list[int] = []

    def ask(stopped: Callable[[], bool]) -> int:
        questions.append(1)
        return 2

    monkeypatch.setattr(gpus, "built_for_cuda", lambda: True)
    monkeypatch.setattr(gpus, "has_driver", lambda: True)
    monkeypatch.setattr(gpus, "ask_torch", ask)
    return questions


@pytest.mark.parametrize(("device", "count"), [("auto", 2), ("cuda", 2), ("cuda:1", 2), ("cpu", 0)])
def test_as_many_as_torch_sees(asked: list[int], device: str, count: int) -> None:
    assert visible_gpus(device) == count
    assert len(asked) == (device != "cpu")


def test_a_gpu_beyond_those_is_refused_before_anything_starts(asked: list[int]) -> None:
    with pytest.raises(ConfigError, match="worker.device is cuda:2: torch sees 2 GPUs.*nvidia-smi"):
        visible_gpus("cuda:2")


def test_a_torch_for_cpus_is_not_asked(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "built_for_cuda", lambda: False)
    assert visible_gpus("auto") == 0
    with pytest.raises(ConfigError, match="worker.device is cuda: torch sees 0 GPUs"):
        visible_gpus("cuda")
    assert not asked


def test_a_host_without_a_driver_is_not_asked(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "has_driver", lambda: False)
    assert visible_gpus("auto") == 0
    with pytest.raises(ConfigError, match="worker.device is cuda: torch sees 0 GPUs"):
        visible_gpus("cuda")
    assert not asked


def test_either_driver_is_known_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "nvidiactl", tmp_path / "dxg"
    monkeypatch.setattr(gpus, "DRIVER_FILES", files)
    assert not has_driver()
    files[1].touch()
    assert has_driver()


@pytest.mark.parametrize("device", ["auto", "cuda:3"])
def test_a_stop_ends_the_question_and_is_no_error(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(gpus, "built_for_cuda", lambda: True)
    monkeypatch.setattr(gpus, "has_driver", lambda: True)
    monkeypatch.setattr(gpus, "_QUESTION", "import time; time.sleep(60)")
    children: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def started(*given: Any, **named: Any) -> subprocess.Popen[str]:
        children.append(start(*given, **named))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", started)
    answers = iter([False, False, True])
    began = time.monotonic()
    assert visible_gpus(device, lambda: next(answers)) == 0
    assert time.monotonic() - began < 10 * slowness()
    assert children[0].returncode == -signal.SIGKILL


def test_a_torch_for_cuda_is_known_by_its_library(tmp_path: Path) -> None:
    assert not built_for_cuda(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    assert built_for_cuda(tmp_path)


def test_the_installed_torch_is_found_without_loading_it() -> None:
    import torch

    assert built_for_cuda() == (torch.version.cuda is not None)


def test_no_torch_at_all_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not built_for_cuda()


def test_the_child_answers_what_torch_sees_here() -> None:
    import torch

    assert gpus.ask_torch(never) == torch.cuda.device_count()


def test_noise_before_the_answer_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_QUESTION", "print('a library says hello'); print(7)")
    assert gpus.ask_torch(never) == 7


@pytest.mark.parametrize("question", ["raise SystemExit('no driver')", "print('none')", ""])
def test_a_child_that_cannot_answer_is_reported(
    monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    monkeypatch.setattr(gpus, "_QUESTION", question)
    with pytest.raises(ConfigError, match="torch cannot list the GPUs.*give --device cpu"):
        gpus.ask_torch(never)


def test_a_child_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_QUESTION", "import time; time.sleep(60)")
    monkeypatch.setattr(gpus, "ASK_TIMEOUT_S", 0.2)
    with pytest.raises(ConfigError, match="did not list the GPUs within 0.2 s"):
        gpus.ask_torch(never)
