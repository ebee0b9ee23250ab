"""`.ci/debian-packages` never fails CI, bounds its downloads, waits for no answer, and knows what
tests skip without."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / ".ci" / "debian-packages"
PACKAGES = {"iproute2", "nftables", "redis-server", "mmdebstrap", "podman", "prometheus",
            "chromium"}  # fmt: skip
MAX_S = 480


def run(folder: Path, programs: dict[str, str]) -> tuple[str, list[str]]:
    """Run the script where these programs alone exist, with a line to read. Return its output, and
    the calls of `timeout`, `dpkg` and `apt-get`."""
    calls = folder / "calls"
    for name, script in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{script.replace('CALLS', str(calls))}\n")
        path.chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, str(SCRIPT)], env={"PATH": str(folder)}, capture_output=True,
                          input="an answer\n", text=True, timeout=60, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, calls.read_text().splitlines() if calls.exists() else []


def machine(download_code: int, user: int = 0, install_code: int = 0) -> dict[str, str]:
    """Return the programs of a machine whose downloads and installation end with these codes."""
    reads = 'read -r line && echo "$line" >> CALLS'
    return {
        "id": f"echo {user}",
        "dpkg": f'{reads}; echo dpkg "$@" >> CALLS',
        "apt-get": f'{reads}; echo apt-get "$@" >> CALLS; exit {install_code}',
        "timeout": f'echo "$@" >> CALLS; exit {download_code}',
    }


def test_missing_packages_are_downloaded_in_bounded_time(tmp_path: Path) -> None:
    output, (_repair, update, *calls) = run(tmp_path, machine(0))
    assert output == ""
    downloads, installs = calls[::2], calls[1::2]
    assert {call.split()[-1] for call in downloads} == PACKAGES
    for call in (update, *downloads):
        assert call.startswith("--kill-after=10 ") and " apt-get " in call
        assert call is update or "--download-only" in call
    assert sum(int(call.split()[1]) for call in (update, *downloads)) <= MAX_S
    for download, install in zip(downloads, installs, strict=True):
        assert install.startswith("apt-get install "), "dpkg is never killed amid its work"
        assert "--no-download" in install and install.split()[-1] == download.split()[-1]


def test_configuration_files_are_kept_without_a_question(tmp_path: Path) -> None:
    _, (repair, _update, *calls) = run(tmp_path, machine(0))
    assert repair == "dpkg --force-confold --configure -a"
    assert len(calls) == 2 * len(PACKAGES)
    assert all(" -o Dpkg::Options::=--force-confold " in call for call in calls)


def test_present_programs_are_not_installed_again(tmp_path: Path) -> None:
    present = dict.fromkeys(("nft", "redis-cli", "mmdebstrap", "podman", "chromium"), "")
    _, (_repair, _update, *calls) = run(tmp_path, {**machine(0), **present})
    assert {call.split()[-1] for call in calls} == {"iproute2", "prometheus"}


@pytest.mark.parametrize("codes", [{"download_code": 100}, {"download_code": 0, "install_code": 9}])
def test_packages_that_cannot_be_installed_are_named(codes: dict[str, int], tmp_path: Path) -> None:
    output, calls = run(tmp_path, machine(**codes))
    for name in PACKAGES:
        assert f"{name} cannot be installed: the tests that need it skip" in output
    assert any("--no-download" in call for call in calls) == ("install_code" in codes)


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
