"""A worker's hello, checked against bounds and the router's own model before it is used.

A worker whose hello cannot be true is not linked: one wrong number would make the placement of
every request fail, on whichever worker. Pure.
"""

from __future__ import annotations

from baton.proto import worker_pb2
from baton.runtime.links import LINK_PROTOCOL_VERSION

# No smaller than what a worker's own settings allow.
MAX_VALUES = {"block_size": 256, "max_context": 1 << 24, "total_blocks": 1 << 31}
MAX_NAME_CHARACTERS = 256  # of a fingerprint or a KV dtype
BOOT_ID_BYTES = 16


def handshake_fault(hello: worker_pb2.WorkerHello, vocab_size: int) -> str | None:
    """Return the first field that cannot be true, with its value and the expected one; None if
    all are plausible. `vocab_size` is that of the router's model."""
    if hello.protocol_version != LINK_PROTOCOL_VERSION:
        return (
            f"protocol_version is {hello.protocol_version}, this router's is "
            f"{LINK_PROTOCOL_VERSION}"
        )
    if len(hello.boot_id) != BOOT_ID_BYTES:
        return f"boot_id has {len(hello.boot_id)} bytes, not {BOOT_ID_BYTES}"
    for name, largest in MAX_VALUES.items():
        value = getattr(hello, name)
        if not 1 <= value <= largest:
            return f"{name} is {value}, not from 1 to {largest}"
    for name in ("model_fingerprint", "kv_dtype"):
        length = len(getattr(hello, name))
        if not 1 <= length <= MAX_NAME_CHARACTERS:
            return f"{name} has {length} characters, not 1 to {MAX_NAME_CHARACTERS}"
    if hello.vocab_size != vocab_size:
        return f"vocab_size is {hello.vocab_size}, this router's model has {vocab_size}"
    return None
