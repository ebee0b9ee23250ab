"""What shows a worker that an order is the cluster's: a proof in the place of the secret.

Orders travel over plain HTTP (admin.py), so the cluster's token never does. A proof is good for
one order to one boot of one worker: whoever hears it can repeat that order to that boot, and do
nothing else; whoever listens where that worker has been, nothing at all. Keeps no state.
"""

from __future__ import annotations

from hashlib import blake2b

PROOF_BYTES = 32


def order_proof(token: str, worker_id: str, boot_id: str, path: str) -> str:
    """As hexadecimal digits. `boot_id` as the registry shows it, `path` as in `/role/decode`; each
    part goes in with its length, so that no two orders have one proof."""
    key = blake2b(token.encode(), digest_size=32, person=b"baton-order-key").digest()
    digest = blake2b(key=key, digest_size=PROOF_BYTES, person=b"baton-order")
    for part in (worker_id, boot_id, path):
        packed = part.encode()
        digest.update(len(packed).to_bytes(4, "little"))
        digest.update(packed)
    return digest.hexdigest()
