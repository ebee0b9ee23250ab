"""Tests of chaos/ run in `make nightly`, since they start fleets; `make test` runs a smoke test."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SMOKE = {"test_run.py", "test_scenarios.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.path.name not in SMOKE:
            item.add_marker(pytest.mark.nightly)
