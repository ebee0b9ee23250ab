"""Public traces and reference timings that lie beside the checkout, and not in it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def shared_trace(name: str) -> Path:
    """Return a file of `shared/traces` in a folder above the checkout; skips the test that asks,
    by the file's name, where there is none."""
    for folder in ROOT.parents:
        if (path := folder / "shared" / "traces" / name).exists():
            return path
    pytest.skip(f"shared/traces/{name} is not beside this checkout")
