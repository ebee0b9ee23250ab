"""What a worker cannot start without: the list is held against what its modules import."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.deploy.host import packages
from baton.deploy.host.packages import NEEDED, check_worker_packages, missing_packages
from baton.runtime.errors import ConfigError
from tests.support.machine_speed import slowness


def imported_at_once(body: list[ast.stmt]) -> Iterator[str]:
    """Full names that a module imports when it is imported itself."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def outside(module: str) -> set[str]:
    """Packages of others that importing `module` imports, through all of our modules."""
    seen: set[str] = set()
    waiting, found = [module], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if not name.startswith("baton."):
            found.add(name.partition(".")[0])
            continue
        path = Path(packages.__file__).parents[2].joinpath(*name.split(".")[1:]).with_suffix(".py")
        if path.is_file():
            waiting += imported_at_once(ast.parse(path.read_text()).body)
    return found - set(sys.stdlib_module_names)


def test_the_list_has_all_that_only_a_worker_imports() -> None:
    router, worker = (
        outside("baton.deploy.processes.router_process"),
        outside("baton.deploy.processes.worker_process"),
    )
    assert "grpc" in router and "torch" not in router
    beyond = worker - router - {"numpy"}  # which comes with the router's package too
    assert beyond == {"torch"}
    # NIXL is imported by name, and numba where a pool lies in host memory
    assert set(NEEDED) == beyond | {"nixl", "numba"}


def lacking(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """They cannot be found any more, nor imported."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


def test_what_is_here_is_enough() -> None:
    check_worker_packages()


@pytest.mark.parametrize("package", NEEDED)
def test_each_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    lacking(monkeypatch, *NEEDED[package])
    with pytest.raises(ConfigError, match=rf"need {package}: pip install 'baton-serve\[worker\]'"):
        check_worker_packages()


@pytest.mark.parametrize(
    ("device", "gpu", "enough"),
    [("cpu", True, False), ("cuda:1", False, True), ("auto", True, True), ("auto", False, False)],
)
def test_numba_is_needed_on_cpus_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, gpu: bool, enough: bool
) -> None:
    lacking(monkeypatch, "numba")
    monkeypatch.setattr(packages, "built_for_cuda", lambda: gpu)
    monkeypatch.setattr(packages, "has_driver", lambda: gpu)
    assert missing_packages(device) == ([] if enough else ["numba"])


def test_all_that_is_missing_is_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "torch", "numba")
    with pytest.raises(ConfigError, match="workers need torch and numba: pip"):
        check_worker_packages()


def test_one_of_nixls_builds_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "nixl_cu13", "nixl_cu12")
    assert importlib.util.find_spec("nixl") is not None
    check_worker_packages()


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--port", "0", "--launcher", "process"],
        ["worker", "--role", "decode", "--worker-id", "d", "--model", ".", "--registry", "r"],
    ],
)
def test_serve_and_worker_say_at_once_what_is_missing(tmp_path: Path, command: list[str]) -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from baton.deploy.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *command],
        env=os.environ | {"BATON_TOKEN": "t", "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60 * slowness(),
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 78
    assert done.stderr == ("baton: error: workers need numba: pip install 'baton-serve[worker]'\n")
    assert done.stdout == ""
