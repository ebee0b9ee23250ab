"""What tests of simulated fleets share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from baton.runtime import logs


@pytest.fixture
def quiet_logs() -> Iterator[None]:
    """Simulated processes log only what is critical."""
    logs.setup("lab", "critical")
    yield
    structlog.reset_defaults()
