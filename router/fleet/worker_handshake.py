"""What a worker says of itself, held against bounds and the router's own model before it is used.

Pure. A worker that says what cannot be is not linked: one wrong number would else fail the
placement of every request, wherever it goes.
"""

from __future__ import annotations

from baton.proto import worker_pb2
from baton.runtime.links import LINK_PROTOCOL_VERSION

# The most that a worker's own settings allow, or more.
MOST = {"block_size": 256, "max_context": 1 << 24, "total_blocks": 1 << 31}
NAME_CHARACTERS = 256  # of a fingerprint, or a kind of KV
BOOT_ID_BYTES = 16


def fault(welcome: worker_pb2.WorkerWelcome, vocab_size: int) -> str:
    """The first field that cannot be true, what it is, and what it has to be; empty if all are
    sound. `vocab_size` is that of the router's model."""
    if welcome.protocol_version != LINK_PROTOCOL_VERSION:
        return (
            f"protocol_version is {welcome.protocol_version}, this router's is "
            f"{LINK_PROTOCOL_VERSION}"
        )
    if len(welcome.boot_id) != BOOT_ID_BYTES:
        return f"boot_id has {len(welcome.boot_id)} bytes, not {BOOT_ID_BYTES}"
    for name, most in MOST.items():
        value = getattr(welcome, name)
        if not 1 <= value <= most:
            return f"{name} is {value}, not from 1 to {most}"
    for name in ("model_fingerprint", "kv_dtype"):
        length = len(getattr(welcome, name))
        if not 1 <= length <= NAME_CHARACTERS:
            return f"{name} has {length} characters, not 1 to {NAME_CHARACTERS}"
    if welcome.vocab_size != vocab_size:
        return f"vocab_size is {welcome.vocab_size}, this router's model has {vocab_size}"
    return ""
