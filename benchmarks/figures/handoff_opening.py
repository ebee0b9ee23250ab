"""The message that opens a handoff of a whole prompt, as a decode worker sends it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from baton.proto import handoff_pb2, worker_pb2


def open_handoff(
    granter_boot_id: bytes, reader_boot_id: bytes, tokens: Sequence[int], lease_ms: int
) -> handoff_pb2.OpenHandoff:
    return handoff_pb2.OpenHandoff(
        handoff_id=secrets.token_bytes(16),
        granter_boot_id=granter_boot_id,
        reader_boot_id=reader_boot_id,
        request_id=secrets.token_hex(8),
        tokens=tokens,
        prompt_tokens=len(tokens),
        sampling=worker_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, seed=1),
        choices=[0],
        lease_ms=lease_ms,
    )
