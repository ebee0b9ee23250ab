"""The choice of the tenant whose cached block is evicted first: one above its share of the pool.

A tenant below its share of the pool loses no cached block while another tenant is above its own; a
single tenant may fill the pool. Pure bookkeeping beside the pool's order of eviction, which is the
same for each tenant. Owned by a `BlockPool`.
"""

from __future__ import annotations

from collections import OrderedDict


class TenantShares:
    """Counts blocks by tenant. A tenant with more than `max_blocks` identified blocks, held or
    cached, is the first to lose cached ones. A block belongs to the tenant that identified it."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._tenant_of: dict[int, bytes] = {}  # of identified blocks
        self._blocks: dict[bytes, int] = {}  # count by tenant
        self._cached: dict[bytes, OrderedDict[int, None]] = {}  # oldest first
        self._above: dict[bytes, None] = {}  # tenants above their share, as an ordered set

    def identified(self, block: int, tenant: bytes) -> None:
        self._tenant_of[block] = tenant
        self._count(tenant, 1)

    def forgotten(self, block: int) -> None:
        """Record that the block lost its identity and is no longer cached."""
        self.taken(block)
        self._count(self._tenant_of.pop(block), -1)

    def cached(self, block: int) -> None:
        """Record that the block lost its last hold: it is the youngest of its tenant."""
        self._cached.setdefault(self._tenant_of[block], OrderedDict())[block] = None

    def taken(self, block: int) -> None:
        """Record that the block is held and, if it was cached, no longer evictable."""
        tenant = self._tenant_of.get(block)
        mine = None if tenant is None else self._cached.get(tenant)
        if tenant is not None and mine is not None:
            mine.pop(block, None)
            if not mine:
                del self._cached[tenant]

    def victim(self) -> int | None:
        """Return the oldest cached block of the tenant that is most above its share; None if no
        tenant above its share has one: then the oldest block of all is evicted."""
        above = [tenant for tenant in self._above if tenant in self._cached]
        if not above:
            return None
        return next(iter(self._cached[max(above, key=self._blocks.__getitem__)]))

    def check(self, identified: set[int], cached: set[int]) -> None:
        """Raise RuntimeError if these records differ from the pool's."""
        mine = [block for blocks in self._cached.values() for block in blocks]
        if set(self._tenant_of) != identified or set(mine) != cached or len(mine) != len(cached):
            raise RuntimeError("the tenants' blocks differ from those of the pool")
        counts: dict[bytes, int] = {}
        for tenant in self._tenant_of.values():
            counts[tenant] = counts.get(tenant, 0) + 1
        above = {tenant for tenant, count in counts.items() if count > self._max_blocks}
        if counts != self._blocks or above != set(self._above):
            raise RuntimeError(f"tenants hold {counts}, counted {self._blocks}")

    def _count(self, tenant: bytes, by: int) -> None:
        count = self._blocks[tenant] = self._blocks.get(tenant, 0) + by
        if not count:
            del self._blocks[tenant]
        if count > self._max_blocks:
            self._above[tenant] = None
        else:
            self._above.pop(tenant, None)
