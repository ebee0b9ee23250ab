"""The base dependencies are what the product imports: a package that nothing imports is none."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = {  # where the module is not called as its package
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "protobuf": "google.protobuf",
}


def test_each_base_dependency_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [re.split(r"[<>=]", each)[0] for each in project["project"]["dependencies"]]
    folders = {
        each.split(".")[1] for each in project["tool"]["setuptools"]["packages"] if "." in each
    }
    code = "\n".join(
        path.read_text() for folder in sorted(folders) for path in (ROOT / folder).rglob("*.py")
    )
    imported = re.findall(r"^\s*(?:from|import) ([\w.]+)", code, re.MULTILINE)
    assert len(names) > 15
    unused = [
        name
        for name in names
        if not any(f"{each}.".startswith(f"{MODULES.get(name, name)}.") for each in imported)
    ]
    assert unused == []
