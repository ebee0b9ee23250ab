"""Whose cached block is given away first: of a tenant that holds more than its share, if one does.

A tenant with less than its share of the pool loses no cached block while another has more than
its own; alone, a tenant may fill the whole pool. Pure bookkeeping beside the pool's own order of
eviction, which is the same for each tenant. Owned by a `BlockPool`.
"""

from __future__ import annotations

from collections import OrderedDict


class TenantShares:
    """`most_blocks`: identified blocks, held or cached, that a tenant has before it is the first
    to lose cached ones. A block belongs to the tenant that identified it."""

    def __init__(self, most_blocks: int) -> None:
        self._most = most_blocks
        self._tenant_of: dict[int, bytes] = {}  # of identified blocks
        self._blocks: dict[bytes, int] = {}  # how many, by tenant
        self._cached: dict[bytes, OrderedDict[int, None]] = {}  # oldest first
        self._over: dict[bytes, None] = {}  # tenants above their share, in a set with an order

    def identified(self, block: int, tenant: bytes) -> None:
        self._tenant_of[block] = tenant
        self._count(tenant, 1)

    def forgotten(self, block: int) -> None:
        """Its identity is gone; it is not cached any more."""
        self.taken(block)
        self._count(self._tenant_of.pop(block), -1)

    def cached(self, block: int) -> None:
        """Nobody holds it any more: the youngest of its tenant."""
        self._cached.setdefault(self._tenant_of[block], OrderedDict())[block] = None

    def taken(self, block: int) -> None:
        """Somebody holds it now, if it was cached."""
        tenant = self._tenant_of.get(block)
        mine = None if tenant is None else self._cached.get(tenant)
        if tenant is not None and mine is not None:
            mine.pop(block, None)
            if not mine:
                del self._cached[tenant]

    def victim(self) -> int | None:
        """The oldest cached block of the tenant that is most above its share; None: nobody who
        is above it has one, and the oldest of all goes."""
        over = [tenant for tenant in self._over if tenant in self._cached]
        if not over:
            return None
        return next(iter(self._cached[max(over, key=self._blocks.__getitem__)]))

    def check(self, identified: set[int], cached: set[int]) -> None:
        """Raise RuntimeError if these books differ from the pool's."""
        mine = [block for blocks in self._cached.values() for block in blocks]
        if set(self._tenant_of) != identified or set(mine) != cached or len(mine) != len(cached):
            raise RuntimeError("the tenants' blocks are not those of the pool")
        counts: dict[bytes, int] = {}
        for tenant in self._tenant_of.values():
            counts[tenant] = counts.get(tenant, 0) + 1
        over = {tenant for tenant, count in counts.items() if count > self._most}
        if counts != self._blocks or over != set(self._over):
            raise RuntimeError(f"tenants hold {counts}, counted {self._blocks}")

    def _count(self, tenant: bytes, by: int) -> None:
        count = self._blocks[tenant] = self._blocks.get(tenant, 0) + by
        if not count:
            del self._blocks[tenant]
        if count > self._most:
            self._over[tenant] = None
        else:
            self._over.pop(tenant, None)
