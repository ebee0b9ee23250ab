"""The doctor's checks one by one, with what they look at replaced, and its exit code."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.deploy import doctor
from baton.deploy.doctor import GIB, Finding
from baton.runtime.config import Config, RouterConfig
from baton.runtime.errors import ConfigError


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def test_pythons_that_are_too_old_or_too_new_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.python().level == "ok"
    for version in ((3, 10, 9), (3, 14, 0)):
        monkeypatch.setattr(sys, "version_info", version)
        assert doctor.python().level == "fail"


def test_a_system_without_pidfd_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.system().level == "ok"
    monkeypatch.delattr(os, "pidfd_open")
    assert doctor.system().level == "fail"


def test_missing_packages_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {finding.level for finding in doctor.packages()} == {"ok"}
    absent = importlib.metadata.PackageNotFoundError("x")
    monkeypatch.setattr(importlib.metadata, "version", raising(absent))
    found = {finding.name: finding for finding in doctor.packages()}
    assert found["torch"].level == "fail" and "baton-serve[worker]" in found["torch"].remedy
    assert found["ray"].level == "warn" and "--launcher process" in found["ray"].remedy
    assert all(finding.remedy for finding in found.values())


def test_little_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.available_memory_bytes() > 0
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: GIB)
    found = doctor.memory()
    assert (found.level, found.found) == ("fail", "1.0 GiB available")


def test_little_shared_memory_warns_and_none_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=64 << 20))
    found = doctor.shared_memory(tmp_path)
    assert found.level == "warn" and "--shm-size" in found.remedy
    assert doctor.shared_memory(tmp_path / "none").level == "fail"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2 * GIB))
    assert doctor.shared_memory(tmp_path) == Finding(
        "shared memory", "ok", f"2.00 GiB free in {tmp_path}"
    )


@pytest.mark.parametrize(("soft", "level"), [(256, "warn"), (65536, "ok"), (-1, "ok")])
def test_few_open_files_warn(monkeypatch: pytest.MonkeyPatch, soft: int, level: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, 65536))
    assert doctor.files().level == level


def test_a_taken_port_fails_with_the_remedy() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = RouterConfig(port=holder.getsockname()[1])
        found = doctor.port(taken)
    assert found.level == "fail" and "--port" in found.remedy
    assert doctor.port(taken).level == "ok"


def test_a_state_folder_that_others_can_read_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.state_folder().level == "ok"
    monkeypatch.setattr(doctor, "runtime_folder", raising(ConfigError("open to others")))
    assert doctor.state_folder() == Finding("state folder", "fail", "not usable", "open to others")


def test_a_machine_without_a_gpu_is_fine_unless_it_has_a_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert doctor.gpu().level == "ok"
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    found = doctor.gpu()
    assert found.level == "warn" and "cuda.txt" in found.remedy


def test_a_gpu_is_named_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"X{number}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (3 << 30, 4 << 30))
    assert doctor.gpu().found == ("cuda:0 X0, 3.0 of 4.0 GiB free, cuda:1 X1, 3.0 of 4.0 GiB free")
    found = doctor.device("auto")
    assert (found.level, found.found) == ("ok", "worker.device is auto: cuda:0, KV in VRAM")
    assert "cuda:1, KV in VRAM" in doctor.device("cuda:1").found
    assert doctor.device("cuda:2").level == "fail"


def test_the_device_that_workers_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor.device("auto")
    assert (found.level, found.found) == ("ok", "worker.device is auto: cpu, KV in DRAM")
    missing = doctor.device("cuda")
    assert missing.level == "fail" and "give cpu" in missing.remedy


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [("port", raising(OSError("no net"))), ("python", doctor.python)]
    monkeypatch.setattr(doctor, "checks", lambda _: broken)
    first, second = doctor.examine(Config())
    assert (first.name, first.level, first.found) == ("port", "fail", "OSError: no net")
    assert second.level == "ok"


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_only_failures_make_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: Any, code: int
) -> None:
    finding = Finding("disk", level, "so and so", "do this")
    monkeypatch.setattr(doctor, "checks", lambda _: [("disk", lambda: finding)])
    assert doctor.doctor(Config(), as_json=False) == code
    out = capsys.readouterr().out
    assert level in out and "so and so" in out and "-> do this" in out
    assert doctor.doctor(Config(), as_json=True) == code
    assert json.loads(capsys.readouterr().out) == [
        {"name": "disk", "level": level, "found": "so and so", "remedy": "do this"}
    ]


@pytest.mark.parametrize(
    ("limit", "used", "available"),
    [
        (None, None, 8 << 30),
        ("max", "5", 8 << 30),
        (str(6 << 30), str(1 << 30), 5 << 30),
        (str(64 << 30), "0", 8 << 30),  # a limit above what the host has
    ],
)
def test_memory_is_what_the_container_has_left_where_that_is_less(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    limit: str | None,
    used: str | None,
    available: int,
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:  {8 << 20} kB\n")
    if limit is not None and used is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(used + "\n")
    monkeypatch.setattr(doctor, "Path", lambda path: tmp_path / path.rsplit("/")[-1])
    assert doctor.available_memory_bytes() == available


def test_a_kernel_that_does_not_tell_its_memory_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    monkeypatch.setattr(doctor, "Path", lambda path: tmp_path / path.rsplit("/")[-1])
    monkeypatch.setattr(doctor, "checks", lambda _: [("memory", doctor.memory)])
    (finding,) = doctor.examine(Config())
    assert (finding.name, finding.level) == ("memory", "fail")
    assert "MemAvailable" in finding.found
