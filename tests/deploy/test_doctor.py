"""The doctor's checks one by one, with what they look at replaced, and its exit code."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NoReturn

import pytest

from baton.deploy.cli import doctor
from baton.deploy.cli.doctor import GIB, Finding, Level
from baton.deploy.host.authority import Authority
from baton.deploy.host.instance import Instance
from baton.runtime import metrics
from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.config import Config, RouterConfig, WorkerConfig
from baton.runtime.errors import ConfigError
from baton.runtime.registry import DirectoryRegistry, WorkerRecord


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
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
    for module in ("torch", "numba", "nixl", "nixl_cu12", "nixl_cu13", "ray", "triton"):
        monkeypatch.setitem(sys.modules, module, None)
    found = {finding.name: finding for finding in doctor.packages()}
    levels = {name: finding.level for name, finding in found.items()}
    needed = {"torch": "fail", "numba": "fail", "nixl": "fail"}  # no worker starts without
    assert levels == needed | {"ray": "warn", "triton": "warn"}
    assert all("pip install" in finding.remedy for finding in found.values())
    assert "baton-serve[worker]" in found["numba"].remedy
    assert "--no-deps" in found["nixl"].remedy and "--launcher process" in found["ray"].remedy


def test_a_package_without_metadata_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = importlib.metadata.PackageNotFoundError("x")
    monkeypatch.setattr(importlib.metadata, "version", raising(absent))
    assert {finding.found for finding in doctor.packages()} == {"unknown version"}


def examined(tmp_path: Path, *absent: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and findings of a real `baton doctor` where these modules cannot be imported,
    in its children neither."""
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in absent)
    (tmp_path / "sitecustomize.py").write_text("import sys\n" + blocked)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = ["doctor", "--json", "--set=worker.device=cpu", "--set=router.port=0"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "baton.deploy.cli.main", *command],
        env=os.environ | {"PYTHONPATH": path, "UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert all(finding["remedy"] for finding in found if finding["level"] != "ok"), found
    return done.returncode, {finding["name"]: finding for finding in found}


def reported(found: dict[str, dict[str, str]], name: str, level: str) -> str:
    """The remedy of a finding that has this level."""
    assert found[name]["level"] == level, found[name]
    return found[name]["remedy"]


@pytest.mark.nightly
def test_without_numba_every_check_ends_in_a_finding(tmp_path: Path) -> None:
    code, found = examined(tmp_path, "numba")
    assert code == 1
    assert "pip install 'baton-serve[worker]'" in reported(found, "numba", "fail")
    assert "pip install 'baton-serve[worker]'" in reported(found, "nixl transport", "fail")
    assert "numba" in found["nixl transport"]["found"]
    assert reported(found, "device", "ok") == reported(found, "torch", "ok") == ""


@pytest.mark.nightly
def test_without_nixl_every_check_ends_in_a_finding(tmp_path: Path) -> None:
    code, found = examined(tmp_path, "nixl", "nixl_cu12", "nixl_cu13")
    assert code == 1
    assert "pip install --no-deps nixl" in reported(found, "nixl", "fail")
    assert "pip install --no-deps nixl" in reported(found, "nixl transport", "fail")


def test_without_torch_and_ray_every_check_ends_in_a_finding(tmp_path: Path) -> None:
    code, found = examined(tmp_path, "torch", "ray")
    assert code == 1
    assert "--launcher process" in reported(found, "ray", "warn")
    for name, level in (("torch", "fail"), ("gpu", "warn"), ("device", "warn")):
        assert "pip install 'baton-serve[worker]'" in reported(found, name, level)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ImportError("libcudart.so is missing"), "pip install 'baton-serve[worker]'"),
        (AttributeError("torch has no __version__"), "see the message"),
        (SystemError("numba and numpy do not fit"), "see the message"),
    ],
)
def test_a_package_may_break_in_any_way(
    monkeypatch: pytest.MonkeyPatch, error: Exception, remedy: str
) -> None:
    monkeypatch.setattr(doctor, "checks", lambda _: [("gpu", raising(error))])
    (found,) = doctor.examine(Config())
    assert (found.level, found.remedy) == ("fail", remedy)
    assert str(error) in found.found


def test_little_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: GIB)
    found = doctor.memory()
    assert (found.level, found.found) == ("fail", "1.0 GiB available")


def test_little_shared_memory_warns_and_none_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)
    # `_replace` is public: a named tuple's methods begin with `_`, so as to be no fields
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


@pytest.mark.parametrize(
    ("soft", "device", "level", "found"),
    [
        (8 << 20, "uverbs0", "warn", "at most 8 MiB, and RDMA locks the whole pool"),
        (GIB - 1, "uverbs3", "warn", "at most 1024 MiB, and RDMA locks the whole pool"),
        (8 << 20, "rdma_cm", "ok", "at most 8 MiB, and no RDMA device that needs more"),
        (GIB, "uverbs0", "ok", "at most 1024 MiB; RDMA locks the whole pool"),
        (resource.RLIM_INFINITY, "uverbs0", "ok", "unlimited"),
    ],
)
def test_little_locked_memory_warns_where_rdma_needs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, soft: int, device: str, level: str, found: str
) -> None:
    limits = {resource.RLIMIT_MEMLOCK: (soft, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    (tmp_path / device).touch()
    finding = doctor.locked_memory(tmp_path)
    assert (finding.name, finding.level, finding.found) == ("locked memory", level, found)
    assert ("LimitMEMLOCK=infinity" in finding.remedy) == (level == "warn")


def test_no_folder_of_rdma_devices_needs_no_locked_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    assert doctor.locked_memory(tmp_path / "none").level == "ok"
    assert ("locked memory", doctor.locked_memory) in doctor.checks(Config())


def test_a_taken_port_fails_with_the_remedy() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = Config(router=RouterConfig(port=holder.getsockname()[1]))
        (found,) = doctor.ports(taken)
    assert found.level == "fail" and "--port" in found.remedy
    (free,) = doctor.ports(taken)
    assert free.level == "ok"


def test_ports_of_a_live_instance_are_in_use_by_baton(instance: Instance) -> None:
    """A second `baton doctor` on a serving host advised to stop what it was called for."""
    with socket.socket() as router, socket.socket() as worker:
        for holder in (router, worker):
            holder.bind(("127.0.0.1", 0))
            holder.listen()
        port, worker_port = router.getsockname()[1], worker.getsockname()[1]
        (instance.folder / "router.address").write_text(f"127.0.0.1:{port}\n")
        here = f"127.0.0.1:{worker_port}"
        record = WorkerRecord("decode-0", "b" * 32, "decode", here, "127.0.0.1:9", "tiny", 7)
        DirectoryRegistry(instance.folder / "registry").announce(record)
        workers = WorkerConfig(port=worker_port)
        found = doctor.ports(Config(router=RouterConfig(port=port), worker=workers))
    assert [(each.name, each.level) for each in found] == [("port", "ok"), ("worker.port", "ok")]
    assert all(each.found.endswith("is in use by baton") for each in found)


@pytest.mark.parametrize(("body", "level"), [(metrics.render(), "ok"), (b"x", "fail")])
def test_ports_of_another_user_are_known_by_their_answer(body: bytes, level: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Host"] == "localhost"  # a router without keys refuses others
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server, socket.socket() as grpc_port:
        grpc_port.bind(("127.0.0.1", 0))
        grpc_port.listen()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        grpc = grpc_port.getsockname()[1]
        found = doctor.ports(Config(router=RouterConfig(port=server.server_port, grpc_port=grpc)))
        server.shutdown()
        thread.join(60)
    assert [(each.name, each.level) for each in found] == [("port", level), ("gRPC port", level)]


def test_a_grpc_port_is_tried_where_it_is_set() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = holder.getsockname()[1]
        config = Config(router=RouterConfig(port=0, grpc_port=number))
        _, found = doctor.ports(config)
    assert (found.name, found.level) == ("gRPC port", "fail")
    assert f"127.0.0.1:{number}" in found.found and "another --grpc-port" in found.remedy
    _, free = doctor.ports(config)
    assert (free.level, free.found) == ("ok", f"127.0.0.1:{number} is free")
    assert len(doctor.ports(Config(router=RouterConfig(port=0, grpc_port=0)))) == 1


@pytest.mark.parametrize("name", ["port", "admin_port"])
def test_a_workers_ports_are_tried_where_they_are_set(name: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = holder.getsockname()[1]
        worker = replace(WorkerConfig(), **{name: number})
        config = Config(router=RouterConfig(port=0), worker=worker)
        _, found = doctor.ports(config)
    assert (found.name, found.level) == (f"worker.{name}", "fail")
    assert f"127.0.0.1:{number}" in found.found and f"another worker.{name}" in found.remedy
    _, free = doctor.ports(config)
    assert (free.level, free.found) == ("ok", f"127.0.0.1:{number} is free")


def test_a_workers_host_that_is_none_of_this_machine_fails() -> None:
    worker = WorkerConfig(host="192.0.2.1", port=9)  # of a network for examples alone
    found = doctor.ports(Config(router=RouterConfig(port=0), worker=worker))[1]
    assert found.level == "fail" and "worker.host" in found.remedy


def test_a_state_folder_that_others_can_read_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.state_folder().level == "ok"
    monkeypatch.setattr(doctor, "runtime_folder", raising(ConfigError("open to others")))
    assert doctor.state_folder() == Finding("state folder", "fail", "not usable", "open to others")


def test_tls_off_is_a_warning_and_unfit_files_a_failure(tmp_path: Path) -> None:
    assert doctor.certificates(Config()).level == "ok"
    off = doctor.certificates(Config(security=SecurityConfig(tls="off")))
    assert off.level == "warn" and "plain text" in off.found and off.remedy
    files = Authority(tmp_path / "tls").issue("decode-0", "127.0.0.1")
    paths = (str(files.authority), str(files.certificate), str(files.key))
    own = Config(security=SecurityConfig("on", *paths))
    assert "ends at 20" in doctor.certificates(own).found
    files.key.chmod(0o644)
    open_key = doctor.certificates(own)
    assert open_key.level == "fail" and "security.key" in open_key.remedy


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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: Level, code: int
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
