"""Exit codes and the one message: what a shell, a user and a keeper see of an ended process."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.deploy.host.instance import ERROR_KEY
from baton.deploy.host.process_exit import INTERRUPTED, exiting
from baton.deploy.host.restarts import CONFIG_EXIT, ILL_EXIT
from baton.runtime.errors import (
    BatonError,
    ConfigError,
    DeviceLost,
    EngineError,
    ModelError,
    WorkerLost,
)


def raising(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(("answer", "code"), [(None, 0), (0, 0), (1, 1), (7, 7)])
def test_an_orderly_end_keeps_its_own_code(answer: int | None, code: int) -> None:
    assert exiting(lambda: answer) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no port"), CONFIG_EXIT),
        (ModelError("no tensor"), CONFIG_EXIT),  # a start with the same model ends the same
        (WorkerLost("gone"), 1),
        (BatonError("odd"), 1),
        (EngineError("all steps fail"), ILL_EXIT),
        (DeviceLost("no answer"), ILL_EXIT),
        (KeyboardInterrupt(), INTERRUPTED),
    ],
)
def test_each_kind_of_end_has_its_code(error: BaseException, code: int) -> None:
    assert exiting(lambda: raising(error)) == code


def test_an_error_is_one_line_and_left_for_the_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ERROR_KEY, str(tmp_path / "decode-0.error"))
    exiting(lambda: raising(WorkerLost("gone")))
    assert capsys.readouterr().err == "baton: error: gone\n"
    assert (tmp_path / "decode-0.error").read_text() == "gone"


def test_a_folder_that_is_gone_changes_no_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ERROR_KEY, str(tmp_path / "removed" / "decode-0.error"))
    assert exiting(lambda: raising(ConfigError("no port"))) == CONFIG_EXIT
    error = capsys.readouterr().err
    assert error.startswith("baton: error: no port\n") and "was not left" in error


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        exiting(lambda: 1 // 0)
