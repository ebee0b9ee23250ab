"""The wheels that a GPU machine without a package index needs for `make gpu`, and their check.

    python -m benchmarks.gpu_parts.wheels --folder build/wheels --python python3.12

Downloads what requirements/gpu.txt pins for Python 3.12 on x86-64, takes out of NIXL's wheel what
nothing here imports, and holds the whole against LIMIT_BYTES. Then installs it into a new
environment, beside numpy alone of what the machine brings, and there imports every package that a
worker needs, all of Baton that needs no torch, and starts a NIXL agent with UCX.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
PINNED = ROOT / "requirements" / "gpu.txt"
LIMIT_BYTES = 60 << 20
VERSION = "3.12"
PLATFORMS = (
    "manylinux_2_31",
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_17",
    "manylinux2014",
)
UNUSED = (
    "nixl_ep_cu13/",  # kernels of another library's; 91 MB unpacked
    "nixl_cu13.libs/ucx/libucx_perftest",
    # object stores, block devices, and a network of which UCX is not the driver
    *(
        f"{folder}/libplugin_{name}"
        for folder in ("nixl_cu13.libs/nixl", ".nixl_cu13.mesonpy.libs/plugins")
        for name in ("AZURE_BLOB", "GPUNETIO", "GUSLI", "INFINIA", "OBJ")
    ),
    "nixl_cu13.libs/libaws-",
    "nixl_cu13.libs/libazure-",
)
CHECK = """
import importlib, sys
for name in sys.argv[1].split():
    importlib.import_module(name)
from nixl_cu13 import _api as nixl
agent = nixl.nixl_agent("check", nixl.nixl_agent_config(backends=[], enable_prog_thread=False))
agent.create_backend("UCX", {})
assert agent.get_agent_metadata()
print("checked", sys.version.split()[0])
"""
IMPORTS = (
    "cffi cryptography.x509 grpc.aio google.protobuf llguidance opentelemetry.sdk.trace orjson "
    "prometheus_client safetensors structlog "
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter "
    "baton.deploy.processes.admin baton.deploy.host.authority baton.deploy.cli.main "
    "baton.kv_transfer.granter "
    "baton.kv_transfer.handshake baton.kv_transfer.nixl_mover baton.kv_transfer.reader "
    "baton.proto.handoff_pb2_grpc baton.proto.worker_pb2_grpc baton.runtime.grpc_links "
    "baton.runtime.grammar.grammar_compiler baton.runtime.grammar.grammar_text "
    "baton.runtime.metrics baton.runtime.registry_client baton.runtime.telemetry.tracing "
    "baton.runtime.tls "
    "baton.runtime.worker.service"
)


class WheelError(Exception):
    """Why there is no usable set of wheels; the message is for people."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR")
    parser.add_argument("--python", default=f"python{VERSION}", help="for the check")
    given = parser.parse_args()
    try:
        download(given.folder)
        wheels = sorted(given.folder.glob("*.whl"))
        for wheel in wheels:
            if wheel.name.startswith("nixl_cu13-"):
                strip(wheel, UNUSED)
        size = check_size(wheels)
        check_pins(wheels)
        said = check_clean(wheels, given.python)
    except WheelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(wheels)} wheels, {size / (1 << 20):.1f} MiB, in {given.folder}: {said}")
    return 0


def download(folder: Path) -> None:
    """All that is pinned, and nothing else in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    line = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    line += ["--implementation=cp", f"--python-version={VERSION}", f"--dest={folder}"]
    line += [f"--platform={platform}_x86_64" for platform in PLATFORMS]
    _run([sys.executable, *line, "-r", str(PINNED)], "the wheels cannot be downloaded")


def strip(wheel: Path, unused: Sequence[str]) -> None:
    """Take what begins with one of `unused` out of a wheel, and out of its RECORD."""
    made = wheel.with_suffix(".new")
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for item in old.infolist():
            if item.filename.startswith(tuple(unused)):
                continue
            content = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                rows = csv.reader(io.StringIO(content.decode()))
                kept = io.StringIO()
                csv.writer(kept, lineterminator="\n").writerows(
                    row for row in rows if row and not row[0].startswith(tuple(unused))
                )
                content = kept.getvalue().encode()
            new.writestr(item, content, zipfile.ZIP_DEFLATED)
    made.replace(wheel)


def check_size(wheels: Sequence[Path]) -> int:
    """Bytes of all. Raises WheelError beyond LIMIT_BYTES."""
    size = sum(wheel.stat().st_size for wheel in wheels)
    if size > LIMIT_BYTES:
        largest = max(wheels, key=lambda wheel: wheel.stat().st_size).name
        raise WheelError(
            f"{size / (1 << 20):.1f} MiB of wheels are more than {LIMIT_BYTES >> 20}: leave "
            f"something out of requirements/gpu.txt; the largest is {largest}"
        )
    return size


def check_pins(wheels: Sequence[Path]) -> None:
    """Raises WheelError unless there is one wheel for each pin."""
    lines = [line for line in PINNED.read_text().splitlines() if line and line[0] != "#"]
    wanted = {tuple(line.split("==")) for line in lines}
    found = {(name.lower().replace("_", "-"), version) for name, version, *_ in map(_parts, wheels)}
    if found != wanted or len(wheels) != len(wanted):
        raise WheelError(f"the wheels differ from requirements/gpu.txt: {sorted(found ^ wanted)}")


def _parts(wheel: Path) -> list[str]:
    return wheel.name.split("-")


def check_clean(wheels: Sequence[Path], python: str) -> str:
    """Install and use them where nothing else is; what that said. Raises WheelError."""
    with TemporaryDirectory() as folder:
        clean = Path(folder) / "clean"
        _run([python, "-m", "venv", "--without-pip", str(clean)], f"{python} makes no environment")
        inside = str(clean / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--python", inside, "install", "--quiet", "--no-deps"]
        _run([*pip, "--no-index", *map(str, wheels)], "the wheels cannot be installed")
        _run([*pip, _numpy()], "numpy cannot be installed")
        baton = Path(folder) / "baton"
        baton.mkdir()
        for package in ("deploy", "kv_transfer", "proto", "runtime"):
            (baton / package).symlink_to(ROOT / package)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": folder}
        return _run([inside, "-c", CHECK, IMPORTS], "the wheels do not work", environment).strip()


def _numpy() -> str:
    """Stands for the machine's own."""
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("numpy=="))


def _run(line: Sequence[str], failure: str, environment: dict[str, str] | None = None) -> str:
    """Its output. Raises WheelError, beginning with `failure`."""
    try:
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WheelError(f"{failure}: {error}") from error
    if done.returncode:
        raise WheelError(f"{failure}: {done.stderr.strip()[-2000:]}")
    return done.stdout.splitlines()[-1] if done.stdout else ""


if __name__ == "__main__":
    sys.exit(main())
