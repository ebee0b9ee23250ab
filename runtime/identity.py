"""The identity of a KV block: which model, which tenant, and every token up to its end.

An identity is a keyed 128-bit hash chained over the blocks of a sequence, so one identity
names the whole prefix that ends with its block. Worker prefix caches, block events and the
router's radix index share it. Pure standard library; knows no tensors and no network.

    root(model, dtype, adapter, salt) ─▶ block 0 ─▶ block 1 ─▶ ...
                                          tokens     tokens
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

IDENTITY_BYTES = 16
NO_TENANT = bytes(IDENTITY_BYTES)  # the tenant of requests without an API key


def cluster_key(secret: str) -> bytes:
    """Return the hash key of a cluster: without `secret`, identities cannot be predicted."""
    return blake2b(secret.encode(), digest_size=32, person=b"baton-identity").digest()


def tenant_salt(key: bytes, tenant: bytes, salt: bytes) -> bytes:
    """Return the salt of a tenant's identities: keyed, so that no tenant can name another's, and
    followed by the tenant's own salt. Empty for a request without a tenant and without a salt;
    else it begins with the part that names the tenant alone."""
    if not tenant and not salt:
        return b""
    name = _keyed(key, tenant, b"baton-tenant-id") if tenant else NO_TENANT
    return name + _keyed(key, len(tenant).to_bytes(4, "little") + tenant + salt, b"baton-tenant")


def tenant_of(salt: bytes) -> bytes:
    """Return the part of a salt that names the tenant, without what the tenant added to it."""
    return salt[:IDENTITY_BYTES] or NO_TENANT


def _keyed(key: bytes, content: bytes, person: bytes) -> bytes:
    return blake2b(content, key=key, digest_size=IDENTITY_BYTES, person=person).digest()


def root(
    key: bytes, model_fingerprint: str, kv_dtype: str, adapter: str = "", salt: bytes = b""
) -> bytes:
    """Return the identity before the first block. Each part is length-prefixed, so that no two
    different tuples hash alike."""
    parts = (model_fingerprint.encode(), kv_dtype.encode(), adapter.encode(), salt)
    content = b"".join([len(part).to_bytes(4, "little") + part for part in parts])
    return blake2b(content, key=key, digest_size=IDENTITY_BYTES).digest()


def child(key: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the identity of the full block that holds `tokens` after the prefix `parent`."""
    packed = array("I", tokens).tobytes()
    return blake2b(parent + packed, key=key, digest_size=IDENTITY_BYTES).digest()


def chain(key: bytes, parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Return the identities of all full blocks of `tokens`; the first block follows `parent`."""
    packed = array("I", tokens).tobytes()
    width = block_size * 4
    identities = []
    for start in range(0, len(packed) - width + 1, width):
        parent = blake2b(
            parent + packed[start : start + width], key=key, digest_size=IDENTITY_BYTES
        ).digest()
        identities.append(parent)
    return identities


class BlockNames(Protocol):
    """The identities of a sequence's blocks."""

    def chain(self, parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
        """Return the identities of all full blocks; the first block follows `parent`."""
        ...

    def child(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Return the identity of the full block that holds `tokens` after `parent`."""
        ...


@dataclass(frozen=True, slots=True)
class KeyedNames:
    """The identities that workers use: `chain` and `child` with a cluster's key."""

    key: bytes

    def chain(self, parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
        return chain(self.key, parent, tokens, block_size)

    def child(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        return child(self.key, parent, tokens)
