"""What a process loads when it starts: no heavy package that it does not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "transformers", "numba", "nixl", "nixl_cu13", "triton")


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("baton.router.server", HEAVY),
        ("baton.deploy.processes.router_process", HEAVY),
        ("baton.deploy.serve.serve", (*HEAVY, "redis")),
        ("baton.deploy.cli.main", (*HEAVY, "grpc", "fastapi", "rich", "pydantic")),
        ("baton.deploy.serve.supervisor", (*HEAVY, "grpc", "fastapi", "structlog", "redis")),
        ("baton.engine.scheduling.batch", ("grpc", "redis", "structlog", "opentelemetry")),
    ],
)
def test_a_process_loads_only_what_it_needs(module: str, forbidden: tuple[str, ...]) -> None:
    code = (
        f"import {module}, sys; "
        f"loaded = [m for m in {forbidden!r} if m in sys.modules]; "
        "sys.exit(f'{loaded} loaded' if loaded else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stderr) == (0, "")
