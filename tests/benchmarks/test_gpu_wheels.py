"""What travels to a GPU machine: pinned as everywhere, small enough, and whole after stripping."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu_parts import wheels as gpu_wheels

ROOT = Path(__file__).resolve().parents[2]
PINS = {
    name: version
    for name, version in (
        line.split("==") for line in gpu_wheels.PINNED.read_text().splitlines() if "==" in line
    )
}


def test_pins_are_those_of_the_cpus_file() -> None:
    known = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    assert {f"{name}=={version}" for name, version in PINS.items()} <= set(known)
    assert not {"numba", "llvmlite", "torch", "triton", "ray"} & set(PINS)


def test_all_that_a_worker_imports_is_pinned() -> None:
    """What Baton's modules name at their top, and the GPU machine does not bring itself."""
    code = """
import ast, json, sys
from importlib.metadata import packages_distributions
from pathlib import Path
import baton.deploy.cli.main, baton.deploy.processes.worker_process
import benchmarks.fleets.worker_pair
own = [each for name, each in sys.modules.items() if name.startswith(("baton.", "benchmarks."))]
named = set()
for node in (n for m in own if m.__file__ for n in ast.parse(Path(m.__file__).read_text()).body):
    if isinstance(node, ast.Import):
        named |= {each.name for each in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
        named.add(node.module)
roots = {each.partition(".")[0] for each in named} - set(sys.stdlib_module_names)
found = packages_distributions()
print(json.dumps({root: found.get(root, []) for root in roots - {"baton", "benchmarks"}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    wanted = json.loads(done.stdout)
    assert {"grpc", "llguidance", "structlog"} <= set(wanted)
    names = {root: {x.lower().replace("_", "-") for x in wanted[root]} for root in wanted}
    missing = {root for root in names if not names[root] & set(PINS)}
    assert missing == {"numpy", "torch"}  # the machine's own


def made_wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    wheel = folder / name
    with zipfile.ZipFile(wheel, "w") as made:
        for path, content in files.items():
            made.writestr(path, content)
        record = "".join(f"{path},sha256=x,{len(content)}\n" for path, content in files.items())
        made.writestr("a-1.dist-info/RECORD", record + "a-1.dist-info/RECORD,,\n")
    return wheel


def test_strip_takes_a_folder_out_of_wheel_and_record(tmp_path: Path) -> None:
    files = {"a/__init__.py": "", "unused/kernels.so": "x" * 1000, "unused_not.py": "1"}
    wheel = made_wheel(tmp_path, "a-1-py3-none-any.whl", files)
    gpu_wheels.strip(wheel, ("unused/",))
    with zipfile.ZipFile(wheel) as left:
        assert left.testzip() is None
        names = {"a/__init__.py", "unused_not.py", "a-1.dist-info/RECORD"}
        assert set(left.namelist()) == names
        record = left.read("a-1.dist-info/RECORD").decode().splitlines()
    assert {line.split(",")[0] for line in record} == names
    assert list(tmp_path.iterdir()) == [wheel]


def test_a_set_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = [tmp_path / "a-1-py3-none-any.whl", tmp_path / "b-1-py3-none-any.whl"]
    for size, wheel in zip((100, 200), wheels, strict=True):
        wheel.write_bytes(b"x" * size)
    assert gpu_wheels.check_size(wheels) == 300
    monkeypatch.setattr(gpu_wheels, "LIMIT_BYTES", 299)
    with pytest.raises(gpu_wheels.WheelError, match=r"requirements/gpu\.txt; the largest is b-1"):
        gpu_wheels.check_size(wheels)


def test_a_wheel_too_few_or_too_many_is_named(tmp_path: Path) -> None:
    whole = [tmp_path / f"{name.replace('-', '_')}-{PINS[name]}-py3-none-any.whl" for name in PINS]
    gpu_wheels.check_pins(whole)
    with pytest.raises(gpu_wheels.WheelError, match="cffi"):
        gpu_wheels.check_pins([wheel for wheel in whole if not wheel.name.startswith("cffi")])
    with pytest.raises(gpu_wheels.WheelError, match="numba"):
        gpu_wheels.check_pins([*whole, tmp_path / "numba-1-py3-none-any.whl"])


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_real_set_is_fetched_stripped_and_works(tmp_path: Path) -> None:
    python = os.environ.get("PYTHON312") or shutil.which("python3.12") or ""
    found = python and subprocess.run([python, "--version"], capture_output=True).returncode == 0
    if not found:
        pytest.skip("there is no python3.12 here")
    line = [sys.executable, "-m", "benchmarks.gpu_parts.wheels", f"--folder={tmp_path}"]
    done = subprocess.run(
        [*line, f"--python={python}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "checked 3.12" in done.stdout
