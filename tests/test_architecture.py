"""The rules of docs and design that a machine can hold: imports, sizes, packaging, wire code.

Imports are read from the syntax tree, so a lazy import inside a function counts too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.proto.generate import GENERATED

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 400
FUNCTION_LINES = 60
FOLDER_FILES = 25

BELOW_DEPLOY = {
    "proto", "runtime", "engine", "kv_transfer", "prefill_worker", "decode_worker", "router",
    "models", "planner", "simulation",
}  # fmt: skip
MAY_IMPORT = {
    "proto": set(),
    "runtime": {"proto"},
    "engine": {"runtime"},
    "kv_transfer": {"runtime", "proto"},
    "prefill_worker": {"engine", "kv_transfer", "runtime", "proto"},
    "decode_worker": {"engine", "kv_transfer", "runtime", "proto"},
    "router": {"runtime", "proto", "planner"},
    "models": {"engine", "runtime"},
    "planner": {"runtime"},
    "simulation": BELOW_DEPLOY - {"simulation", "models"},
    "deploy": BELOW_DEPLOY,
}
NEVER_IMPORT = {
    "proto": {"torch", "ray", "nixl"},
    "runtime": {"torch", "ray"},
    "engine": {"grpc", "redis", "ray", "nixl"},
    "kv_transfer": {"ray"},
    "prefill_worker": {"ray"},
    "decode_worker": {"ray"},
    "router": {"torch", "ray", "transformers"},
    "models": {"ray", "transformers"},
    "planner": {"torch", "ray", "grpc"},
    "simulation": {"ray"},
    "deploy": set(),
}
UNPACKAGED = ("benchmarks", "chaos")  # held to the sizes, and to the table of rooms
# Rooms of a folder and which of the same folder they import; "." is its modules outside a room.
# A room stands below those that import it.
ROOMS: dict[str, dict[str, set[str]]] = {
    "engine": {
        "scheduling": set(),
        "spec": set(),
        "memory": {"spec"},
        "model": {"scheduling", "spec", "memory"},
        "sampling": {"scheduling", "model"},
        "cpu": {"scheduling", "spec", "memory", "model"},
        "cpu_draws": {"scheduling", "sampling", "cpu"},
        "triton": {"spec", "memory", "model", "sampling"},
        "deterministic": {"spec", "memory", "model", "cpu", "triton"},
        "checkpoint": {"spec", "memory", "model"},
        "speculation": {"scheduling", "spec", "memory", "model", "sampling", "checkpoint"},
        "execution": {
            "scheduling",
            "spec",
            "memory",
            "model",
            "sampling",
            "cpu",
            "cpu_draws",
            "triton",
            "checkpoint",
            "deterministic",
            "speculation",
        },
        "ranks": {
            "sampling",
            "scheduling",
            "spec",
            "memory",
            "model",
            "cpu",
            "checkpoint",
            "deterministic",
            "speculation",
            "execution",
        },
        "device_ranks": {
            "scheduling",
            "spec",
            "memory",
            "model",
            "triton",
            "checkpoint",
            "deterministic",
            "execution",
            "ranks",
        },  # fmt: skip
    },
    "router": {
        "text": set(),
        "templates": {"text"},
        "grammars": {"text"},
        "requests": {"text", "templates", "grammars"},
        "fleet": {"requests"},
        "dispatch": {"requests", "fleet"},
        "answers": {"text", "requests", "dispatch"},
        "client_access": {"text", "requests", "fleet", "answers"},
        "http_frontend": {"text", "requests", "fleet", "answers", "client_access"},
        "grpc_frontend": {"text", "requests", "answers", "client_access"},
        "console": {"fleet", "dispatch", "answers", "client_access", "http_frontend"},
        ".": {
            "text",
            "templates",
            "grammars",
            "requests",
            "fleet",
            "dispatch",
            "answers",
            "client_access",
            "http_frontend",
            "grpc_frontend",
            "console",
        },
    },
    "kv_transfer": {
        ".": set(),
        "peers": {"."},
    },
    "models": {
        "corpus": set(),
        "training": {"corpus"},
        "evaluation": {"corpus", "training"},
        ".": {"training", "evaluation"},
    },
    "planner": {
        ".": set(),
        "control": {"."},
    },
    "runtime": {
        ".": set(),
        "serving": {"."},
        "settings": {"."},
        "exposition": {"."},
        "telemetry": {"."},
        "grammar": {".", "telemetry"},
        "shared_registry": {"."},
        "worker": {"."},
    },
    "simulation": {
        "virtual": set(),
        "fleet": {"virtual"},
        "control": {"virtual", "fleet"},
        "invariants": {"virtual", "fleet", "control"},
        "mutations": {"fleet", "control"},
        "capacity": set(),
        ".": {"virtual", "fleet", "control", "invariants", "mutations"},
    },
    "benchmarks": {
        "figures": set(),
        "inputs": set(),
        "fleets": {"inputs"},
        "peers": {"figures"},
        "gpu_parts": {"figures", "fleets"},
        "controller": {"figures"},
        "advice": {"figures", "fleets"},
        "simulator": {"figures", "fleets", "inputs"},
        "placement": {"figures", "inputs"},
        "disaggregation": {"figures", "fleets", "inputs"},
        "chunk_orders": {"figures", "fleets", "inputs"},
        "start_time": {"figures"},
        ".": {"figures", "inputs", "fleets", "peers", "gpu_parts"},
        "console": {"figures", "fleets", "."},
        "unlike": {"figures", "."},
    },
    "deploy": {
        "host": set(),
        "processes": {"host"},
        "control": {"host", "processes"},
        "docker": set(),
        "serve": {"host"},
        "nodes": {"host", "processes", "control", "serve"},
        "monitoring": set(),
        "bench": {"host", "serve"},
        "plots": {"host", "bench"},
        "cli": {"host", "serve", "processes", "control", "nodes", "bench", "plots"},
    },
}
STILL_CYCLIC: set[str] = set()  # shrinks to nothing
STILL_LARGE: dict[str, int] = {}  # files; shrinks to nothing
ENGINE_MAY_USE = {
    f"baton.runtime.{name}"
    for name in (
        "errors",
        "cluster_config",
        "config",
        "end_tokens",
        "identity",
        "sampling",
        "setting",
        "waits",
        "worker.attention_pairs",
    )
}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
GENERATED_SUFFIXES = tuple(pattern.removeprefix("*") for pattern in GENERATED)


def sources(folder: str) -> list[Path]:
    return [
        path
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.name.endswith(GENERATED_SUFFIXES)
    ]


def all_sources() -> list[Path]:
    return [path for folder in MAY_IMPORT for path in sources(folder)]


def unpackaged_sources() -> list[Path]:
    return [path for folder in UNPACKAGED for path in sources(folder)]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Full names of what a file imports; `from a import b` counts as a.b too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            assert node.module is not None
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def room_of(path: Path, folder: str) -> str:
    (room,) = path.relative_to(ROOT / folder).parts[:-1] or (".",)
    return room


def imported_rooms(path: Path, folder: str) -> Iterator[tuple[str, int]]:
    """Rooms of `folder` that one of its files imports, its own included."""
    for name, line in imports(path):
        inner = name.removeprefix("baton.").split(".")
        if inner[0] == folder and len(inner) > 1:
            room = inner[1]
            yield room if (ROOT / folder / room).is_dir() else ".", line


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_only_what_lies_below_them(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | {folder}
    wrong = []
    for path in sources(folder):
        for name, line in imports(path):
            parts = name.split(".")
            if parts[0] == "baton" and parts[1] not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
            if parts[0] in NEVER_IMPORT[folder]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []


def test_the_engine_uses_only_what_is_pure_in_runtime() -> None:
    wrong = [
        f"{path.name}:{line} imports {name}"
        for path in sources("engine")
        for name, line in imports(path)
        if name.startswith("baton.runtime")
        and not any(f"{name}.".startswith(f"{used}.") for used in ENGINE_MAY_USE)
    ]
    assert wrong == []
    for used in ENGINE_MAY_USE:
        path = ROOT / f"{used.removeprefix('baton.').replace('.', '/')}.py"
        roots = {name.split(".")[0] for name, _ in imports(path)}
        outside = {n for n, _ in imports(path) if n.startswith("baton.")}
        assert roots - {"baton"} <= sys.stdlib_module_names
        assert all(any(n.startswith(f"{m}.") for m in ENGINE_MAY_USE) for n in outside)


@pytest.mark.parametrize(("folder", "room"), [(f, room) for f in ROOMS for room in ROOMS[f]])
def test_a_room_imports_only_what_its_row_allows(folder: str, room: str) -> None:
    allowed = ROOMS[folder][room] | {room}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {other}"
        for path in sources(folder)
        if room_of(path, folder) == room
        for other, line in imported_rooms(path, folder)
        if other not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_stand_below_those_that_import_them(folder: str) -> None:
    above = set()
    below: set[str] = set()
    for room, imported in ROOMS[folder].items():
        above |= {f"{room} imports {other}" for other in imported - below}
        below.add(room)
    assert bool(above) == (folder in STILL_CYCLIC), above


def test_every_folder_of_code_is_under_the_rules() -> None:
    listed = [name.removeprefix("baton.") for name in packaging()["packages"]]
    packaged = {name for name in listed if "." not in name}
    assert set(MAY_IMPORT) == set(NEVER_IMPORT)
    assert packaged <= set(MAY_IMPORT)
    assert packaged == {path.parent.name for path in ROOT.glob("*/py.typed")}
    (line,) = [x for x in (ROOT / "Makefile").read_text().splitlines() if x[:11] == "PACKAGES :="]
    assert packaged == set(line.split()[2:])
    with_code = {path.parent.name for path in ROOT.glob("*/*.py")}
    assert with_code - packaged <= {"tests", "benchmarks", "chaos", "examples"}
    for name in packaged:
        rooms = {room_of(path, name) for path in sources(name)}
        assert rooms == set(ROOMS.get(name, {".": set()})), f"the rooms of {name}"
        nested = {f"{name}.{room}" for room in rooms - {"."}}
        assert nested == {x for x in listed if x.startswith(f"{name}.")}, f"the packages of {name}"
    for name in UNPACKAGED:
        rooms = {room_of(path, name) for path in sources(name)}
        assert rooms == set(ROOMS.get(name, {".": set()})), f"the rooms of {name}"
    assert len(listed) == len(set(listed))


def test_a_folder_holds_few_enough_files() -> None:
    counts: dict[Path, int] = {}
    for path in [*all_sources(), *unpackaged_sources()]:
        counts[path.parent] = counts.get(path.parent, 0) + 1
    large = {str(folder.relative_to(ROOT)): n for folder, n in counts.items() if n > FOLDER_FILES}
    assert large == STILL_LARGE


def packaging() -> dict[str, list[str]]:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return {"packages": found["packages"]}


def test_names_that_others_own_stay_free() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "proto" / "__init__.py").exists(), "proto-plus owns `proto`"
    assert not (ROOT / "baton").exists()


def test_files_and_functions_stay_small() -> None:
    wrong = []
    for path in [*all_sources(), *unpackaged_sources(), *sources("tests")]:
        text = path.read_text()
        if (lines := text.count("\n")) > FILE_LINES:
            wrong.append(f"{path.relative_to(ROOT)} has {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (length := node.end_lineno - node.lineno + 1) > FUNCTION_LINES:
                    wrong.append(f"{path.relative_to(ROOT)} {node.name} has {length} lines")
    assert wrong == []


def test_every_module_opens_by_saying_what_it_is() -> None:
    lacking = [
        str(path.relative_to(ROOT))
        for path in all_sources()
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert lacking == []


def test_no_file_is_named_for_nothing() -> None:
    assert [str(path) for path in all_sources() if path.stem in FORBIDDEN_NAMES] == []


def test_the_generated_wire_code_is_current(tmp_path: Path) -> None:
    # in a process of its own: protoc's library and others loaded here do not bear each other
    command = [sys.executable, "-P", "-m", "baton.proto.generate", str(tmp_path)]
    subprocess.run(command, check=True, timeout=250, cwd=ROOT)
    fresh = {path.name: path.read_bytes() for path in tmp_path.rglob("*_pb2*")}
    kept = {path.name for pattern in GENERATED for path in (ROOT / "proto").glob(pattern)}
    assert kept == set(fresh)
    stale = [n for n, code in fresh.items() if (ROOT / "proto" / n).read_bytes() != code]
    assert stale == [], "run `make proto`"
