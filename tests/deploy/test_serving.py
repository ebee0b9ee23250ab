"""What `baton serve` says and does beside its jobs: certificates, warnings, the ready line."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.deploy.host.authority import Authority
from baton.deploy.host.instance import (
    ADMIN_KEY,
    ADMIN_KEY_FILE,
    Instance,
    JobState,
    JobStatus,
    grpc_address_file,
    read_environment,
    write_private,
)
from baton.deploy.serve import serve
from baton.deploy.serve.flag_values import NO_ADMIN
from baton.deploy.serve.model_source import ModelSource
from baton.deploy.serve.plan import ServeOptions, switched_off
from baton.deploy.serve.serve import Serving
from baton.router.console.admin_port import AdminAccess
from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.config import Config, RouterConfig, WorkerConfig
from baton.runtime.errors import BatonError, ConfigError
from tests.support import serving_phases


def prepared(instance: Instance, **config: Any) -> tuple[Serving, list[str]]:
    """A Serving whose jobs are written, and what it says."""
    said: list[str] = []
    options = ServeOptions(Config(**config), launcher="process")
    serving = Serving(options, said.append)
    serving_phases.prepare(serving, instance, ModelSource(Path("/m"), "name"))
    return serving, said


@pytest.mark.parametrize("own", [None, "a-key-of-my-own-0123456789"])
def test_the_operators_key_is_kept_in_a_private_file(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    if own is not None:
        monkeypatch.setenv(ADMIN_KEY, own)
    _, said = prepared(instance)
    file = instance.folder / ADMIN_KEY_FILE
    key = file.read_text().strip()
    assert AdminAccess(key).host == "127.0.0.1" and key == (own or key)
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_environment(instance.folder)[ADMIN_KEY] == key
    assert key not in "".join(said)


def test_without_an_admin_port_there_is_no_key(instance: Instance) -> None:
    options = ServeOptions(Config(), launcher="process", admin_port=NO_ADMIN)
    serving = Serving(options, lambda _: None)
    serving_phases.prepare(serving, instance, ModelSource(Path("/m"), "name"))
    assert ADMIN_KEY not in read_environment(instance.folder)
    assert not (instance.folder / ADMIN_KEY_FILE).exists()


def test_a_full_runtime_folder_ends_the_start_with_a_remedy(
    stand_in_model: Path, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(serve, "write_private", fail)
    config = Config(router=RouterConfig(port=0), worker=WorkerConfig(device="cpu"))
    options = ServeOptions(config, model=str(stand_in_model), launcher="process")
    with pytest.raises(ConfigError, match=r"cannot be written \(No space.*XDG_RUNTIME_DIR"):
        Serving(options, lambda _: None).run()
    assert list((runtime_folder / "baton").iterdir()) == []


def test_tls_that_is_off_is_said_and_makes_no_certificates(instance: Instance) -> None:
    _, said = prepared(instance, security=SecurityConfig(tls="off"))
    assert "WARNING: security.tls is off" in "".join(said)
    assert not (instance.folder / "tls").exists()


@pytest.mark.parametrize(
    ("mode", "reported"), [("disabled", True), ("Token", False), (None, False)]
)
def test_a_ray_that_asks_for_no_token_is_said(mode: str | None, reported: bool) -> None:
    environ = {} if mode is None else {"RAY_AUTH_MODE": mode}
    said = list(switched_off(ServeOptions(Config(), launcher="ray"), environ))
    assert [word for line in said for word in line.split()[:3]] == (
        ["RAY_AUTH_MODE", "is", "disabled:"] if reported else []
    )
    joined = ServeOptions(Config(), launcher="ray", ray_address="10.0.0.1:6379")
    assert not list(switched_off(joined, environ))  # that one's owner has decided


def test_certificates_are_renewed_while_it_serves(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, said = prepared(instance, security=SecurityConfig())
    assert "WARNING" not in "".join(said)
    renewals = []

    def renew(authority: Authority) -> None:
        renewals.append(authority)
        if len(renewals) == 2:
            raise OSError(28, "No space left on device")
        if len(renewals) == 4:
            serving.stop()

    class Idle:
        def tend(self) -> None:
            pass

    monkeypatch.setattr(Authority, "renew", renew)
    serving_phases.watch(serving, instance, Idle())
    assert len(renewals) == 4
    assert "No space left" in said[-1] and "cannot be renewed" in said[-1]


@pytest.mark.parametrize("address", ["127.0.0.1:8001", None])
def test_the_ready_line_names_grpc_where_it_is_served(tmp_path: Path, address: str | None) -> None:
    if address is not None:
        write_private(grpc_address_file(tmp_path / "router.address"), address)
    reported: list[str] = []
    serving = Serving(ServeOptions(Config()), reported.append)
    model = ModelSource(tmp_path, "m")
    serving_phases.announce(serving, "http://127.0.0.1:8000", model, tmp_path)
    assert reported[0].startswith("Ready at http://127.0.0.1:8000 after ")
    assert ("(gRPC at 127.0.0.1:8001)" in reported[0]) is (address is not None)


class ScriptedLauncher:
    """A launcher that takes one scripted step at each call of `tend`, then stops the serving."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *script: Callable[[], Exception | None]
    ) -> None:
        self.script = list(script)
        self.said: list[str] = []
        self.serving = Serving(ServeOptions(Config()), lambda line: self.said.append(line[11:]))
        monkeypatch.setattr(serve, "TICK_S", 0.0)

    def tend(self) -> None:
        if not self.script:
            self.serving.stop()
        elif error := self.script.pop(0)():
            raise error


def put(
    instance: Instance, name: str, state: JobState, starts: int, **more: Any
) -> Callable[[], None]:
    status = JobStatus(name, state, 7, starts, **more)
    return lambda: write_private(instance.folder / f"{name}.status", json.dumps(asdict(status)))


def test_a_supervisor_that_cannot_start_is_reported_once(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> BatonError:
        return BatonError("the supervisor of decode-0 was not started: no process")

    again = put(instance, "decode-0", "running", 2, ended="with its supervisor")
    launcher = ScriptedLauncher(monkeypatch, fail, fail, fail, again, fail)
    serving_phases.watch(launcher.serving, instance, launcher)
    failure = "the supervisor of decode-0 was not started: no process; the next attempt follows"
    assert launcher.said == [failure, "decode-0 died (with its supervisor); restarted", failure]


def test_a_job_that_cannot_start_yet_is_reported_and_ends_none(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = [
        put(instance, "decode-0", "waiting", starts, ended="signal 9", message="no process")
        for starts in (2, 3, 4)
    ]
    again = put(instance, "decode-0", "running", 5, ended="signal 9")
    launcher = ScriptedLauncher(monkeypatch, *waits, again)
    serving_phases.watch(launcher.serving, instance, launcher)
    assert launcher.said == [
        "no process; the next attempt follows",
        "decode-0 died (signal 9); restarted",
    ]


def test_a_status_that_cannot_be_read_ends_nothing(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = serve.read_status, [3]

    def read(folder: Path, name: str) -> JobStatus | None:
        if left[0]:
            left[0] -= 1
            raise OSError(24, "too many open files")
        return real(folder, name)

    monkeypatch.setattr(serve, "read_status", read)
    launcher = ScriptedLauncher(monkeypatch, *[lambda: None] * 5)
    serving_phases.watch(launcher.serving, instance, launcher)
    assert left == [0] and len(launcher.said) == 1 and "too many open files" in launcher.said[0]


def test_a_job_that_was_given_up_ends_it_with_a_log_or_without(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(instance, "decode-0", "failed", 5, ended="exit code 1")()
    launcher = ScriptedLauncher(monkeypatch, *[lambda: None] * 5)
    with pytest.raises(ConfigError, match=r"\(exit code 1\)\. .*\nit cannot be read: .*decode-0"):
        serving_phases.watch(launcher.serving, instance, launcher)
    (instance.folder / "decode-0.log").write_text("ValueError: a bug\n")
    with pytest.raises(ConfigError, match=r"The end of its log:\nValueError: a bug"):
        serving_phases.watch(launcher.serving, instance, launcher)


def test_a_line_that_cannot_be_said_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr("sys.stdout", full)
        serve.print_line("ready")
        with pytest.raises(OSError, match="No space"):
            full.flush()
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space"):
            full.close()


class Ending:
    """An instance that notes what of it is ended, and which haste is asked of it."""

    instance_id = "0" * 32

    def __init__(self, folder: Path, during: Callable[[], object] = lambda: None) -> None:
        self.folder, self.during = folder, during
        self.ended: list[tuple[str, bool]] = []

    def end_job(self, name: str, hurried: Callable[[], bool]) -> None:
        self.during()
        self.ended.append((name, hurried()))

    def end(self, hurried: Callable[[], bool], sweep: Callable[[], None]) -> None:
        self.ended.append(("all", hurried()))
        sweep()


@pytest.mark.parametrize("presses", [1, 2])
def test_the_router_ends_first_and_a_second_ctrl_c_hurries_all(
    tmp_path: Path, presses: int
) -> None:
    """The workers are there while its streams end."""
    said: list[str] = []
    serving = Serving(ServeOptions(Config()), said.append)
    serving.stop()
    ending = Ending(tmp_path, lambda: [serving.stop() for _ in range(presses - 1)])
    serving_phases.end(serving, ending)
    assert ending.ended == [("router", presses > 1), ("all", presses > 1)]
    assert len(said) == 2  # that it stops, and has stopped


def test_a_long_end_says_what_it_waits_for_and_how_to_cut_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "REPORT_AFTER_S", -1.0)
    said: list[str] = []
    serving = Serving(ServeOptions(Config()), said.append)
    serving.stop()
    serving_phases.end(serving, Ending(tmp_path))
    (reported,) = [line for line in said if "Ctrl-C again" in line]
    assert "open requests may finish" in reported
    assert [line for line in said if "all requests have ended" in line] == said[2:3]


def test_nothing_is_said_of_requests_once_the_router_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a start fails, or with nothing open: it is the other processes that take long."""

    class Idle(Ending):
        def end_job(self, name: str, hurried: Callable[[], bool]) -> None: ...

    monkeypatch.setattr(serve, "REPORT_AFTER_S", -1.0)
    said: list[str] = []
    serving_phases.end(Serving(ServeOptions(Config()), said.append), Idle(tmp_path))
    assert not any("Ctrl-C again" in line for line in said)
    assert "waiting for the other processes" in said[1]


def test_what_ends_by_itself_is_no_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`baton demo --once` asked to end while its answer comes: others' requests may finish too."""

    class AtOnce:
        def __init__(self, target: Callable[[], None], daemon: bool) -> None:
            self.start = target

    monkeypatch.setattr(serve, "threading", SimpleNamespace(Thread=AtOnce))
    model = ModelSource(Path("/m"), "m")
    serving = Serving(ServeOptions(Config()), lambda _: None)
    serving_phases.start_after_ready(serving, lambda *_: False, "http://x", model)
    assert serving_phases.stop_state(serving) == (True, False)
    serving = Serving(ServeOptions(Config()), lambda _: None)
    serving.stop()
    serving_phases.start_after_ready(serving, lambda *_: False, "http://x", model)
    assert serving_phases.stop_state(serving) == (True, False)
    serving.stop()
    assert serving_phases.stop_state(serving) == (True, True)
