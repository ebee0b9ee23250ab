"""What scenarios judge by themselves."""

from __future__ import annotations

import pytest

from chaos.scenarios import phases_not_left


@pytest.mark.parametrize(
    ("waiting", "called_off", "streaming", "void"),
    [
        (6, 3, 3, None),
        (1, 1, 1, None),
        (0, 3, 3, "no client left before its first token"),
        (6, 0, 3, "no client left while a handoff was under way"),
        (6, 3, 0, "no client left while tokens came"),
        (6, 0, 0, "no client left while a handoff was under way, nor while tokens came"),
    ],
)
def test_a_run_of_leaving_clients_is_void_if_a_phase_is_missing(
    waiting: int, called_off: float, streaming: int, void: str | None
) -> None:
    assert phases_not_left(waiting, called_off, streaming) == void
