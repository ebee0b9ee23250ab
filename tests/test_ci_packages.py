"""`.ci/debian-packages` never fails CI, ends in bounded time, and knows what tests skip without."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / ".ci" / "debian-packages"
PACKAGES = {"iproute2", "nftables", "redis-server", "mmdebstrap", "prometheus", "chromium"}
MAX_S = 480


def run(folder: Path, programs: dict[str, str]) -> tuple[str, list[str]]:
    """Run the script where these programs alone exist; its output, and the calls of `timeout`."""
    calls = folder / "calls"
    for name, script in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{script.replace('CALLS', str(calls))}\n")
        path.chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, str(SCRIPT)], env={"PATH": str(folder)}, capture_output=True,
                          text=True, timeout=60, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, calls.read_text().splitlines() if calls.exists() else []


def machine(apt_code: int, user: int = 0) -> dict[str, str]:
    """Return the programs of a machine whose apt-get ends with this exit code."""
    return {
        "id": f"echo {user}",
        "apt-get": "exit 1",
        "timeout": f'echo "$@" >> CALLS; exit {apt_code}',
    }


def test_missing_packages_are_installed_in_bounded_time(tmp_path: Path) -> None:
    output, calls = run(tmp_path, machine(0))
    assert output == ""
    assert {call.split()[-1] for call in calls[1:]} == PACKAGES
    assert all(call.startswith("--kill-after=10 ") and " apt-get " in call for call in calls)
    assert sum(int(call.split()[1]) for call in calls) <= MAX_S


def test_present_programs_are_not_installed_again(tmp_path: Path) -> None:
    present = dict.fromkeys(("nft", "redis-cli", "mmdebstrap", "chromium"), "")
    _, calls = run(tmp_path, {**machine(0), **present})
    assert {call.split()[-1] for call in calls[1:]} == {"iproute2", "prometheus"}


def test_packages_that_cannot_be_installed_are_named(tmp_path: Path) -> None:
    output, _ = run(tmp_path, machine(100))
    for name in PACKAGES:
        assert f"{name} cannot be installed: the tests that need it skip" in output


@pytest.mark.parametrize("programs", [{"id": "echo 0"}, machine(0, user=1000)])
def test_a_machine_without_apt_or_rights_goes_on(tmp_path: Path, programs: dict[str, str]) -> None:
    output, calls = run(tmp_path, programs)
    assert all(name in output for name in PACKAGES) and calls == []


def test_every_package_that_a_skip_names_is_known() -> None:
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("chaos/*.py")]
    named = {
        name
        for path in files
        for name in re.findall(r"Debian's package ([\w-]+)\)", path.read_text())
    }
    assert {"nftables", "redis-server"} <= named
    assert named <= PACKAGES
