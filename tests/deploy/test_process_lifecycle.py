"""The open-file limit at a process's start, SIGTERM while it loads; exit code and message at its
end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.deploy.host.instance import ERROR_KEY
from baton.deploy.host.process_lifecycle import (
    INTERRUPTED_EXIT,
    MAX_OPEN_FILES,
    raise_open_file_limit,
    run_to_exit_code,
)
from baton.deploy.host.restarts import CONFIG_EXIT, UNHEALTHY_EXIT
from baton.runtime.errors import (
    BatonError,
    ConfigError,
    DeviceLost,
    EngineError,
    ModelError,
    WorkerLost,
)
from tests.support.machine_speed import slowness
from tests.support.waiting import wait_until


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def raising(error: BaseException) -> int:
    raise error


def test_the_soft_limit_is_raised_to_the_hard_limit(limits: tuple[int, int]) -> None:
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert raise_open_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert raise_open_file_limit() == (MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard


def test_an_infinite_soft_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: infinite)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("nothing to raise"))
    assert raise_open_file_limit() == resource.RLIM_INFINITY


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a PID namespace")
@pytest.mark.parametrize(
    "command", [["worker", "--role", "decode", "--worker-id", "d"], ["router"]], ids=["w", "r"]
)
def test_a_first_process_that_loads_ends_at_sigterm(command: list[str], tmp_path: Path) -> None:
    """As the first process of a container, which has no default action for the signal. It waits
    for its model's configuration, a pipe."""
    model, registry = tmp_path / "model", tmp_path / "registry"
    model.mkdir()
    registry.mkdir(0o700)
    os.mkfifo(model / "config.json")
    started = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-P", "-m",
         "baton.deploy.cli.main", *command, "--model", model, "--registry", registry,
         "--set", "security.tls=off"],
        env=os.environ | {"BATON_TOKEN": "a token of sixteen or more characters"},
    )  # fmt: skip
    try:
        wait_until(lambda: _is_read(model / "config.json") or started.poll() is not None)
        (child,) = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        assert started.wait(20 * slowness()) == 128 + signal.SIGTERM
    finally:
        started.kill()
        started.wait()


def _is_read(pipe: Path) -> bool:
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:  # no process has opened it
        return False
    return True


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1), (7, 7)])
def test_a_normal_end_keeps_its_own_code(returned: int | None, code: int) -> None:
    assert run_to_exit_code(lambda: returned) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no port"), CONFIG_EXIT),
        (ModelError("no tensor"), CONFIG_EXIT),  # a start with the same model ends the same
        (WorkerLost("gone"), 1),
        (BatonError("odd"), 1),
        (EngineError("all steps fail"), UNHEALTHY_EXIT),
        (DeviceLost("no answer"), UNHEALTHY_EXIT),
        (KeyboardInterrupt(), INTERRUPTED_EXIT),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: BaseException, code: int) -> None:
    assert run_to_exit_code(lambda: raising(error)) == code


def test_an_error_is_one_line_and_written_for_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ERROR_KEY, str(tmp_path / "decode-0.error"))
    run_to_exit_code(lambda: raising(WorkerLost("gone")))
    assert capsys.readouterr().err == "baton: error: gone\n"
    assert (tmp_path / "decode-0.error").read_text() == "gone"


def test_a_removed_folder_changes_no_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ERROR_KEY, str(tmp_path / "removed" / "decode-0.error"))
    assert run_to_exit_code(lambda: raising(ConfigError("no port"))) == CONFIG_EXIT
    error = capsys.readouterr().err
    assert error.startswith("baton: error: no port\n") and "not written for the supervisor" in error


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_to_exit_code(lambda: 1 // 0)
