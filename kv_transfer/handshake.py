"""The handshake of two workers: their identities, their pools, and whether the pools fit.

`check` names all differences at once, so that an operator repairs them together. Only the
tensor-parallel size and rank, the memory type, and KV dtypes and block sizes that both sides bridge
may differ. The module is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.kv_transfer.block_sizes import ALIKE, block_ratio
from baton.kv_transfer.checksum import CHECKSUM_ALGORITHM
from baton.kv_transfer.layout import LAYOUT_VERSION, heads_of
from baton.kv_transfer.local_pool import MEMORY_KINDS, RankPool
from baton.kv_transfer.mover import PeerPool
from baton.proto import handoff_pb2
from baton.runtime.errors import Incompatible
from baton.runtime.worker.kv_bridge import most_targets

PROTOCOL_VERSION = 1
BOOT_ID_BYTES = 16
MAX_POOL_BLOCKS = 1 << 24  # NIXL keeps a descriptor of each
MAX_METADATA_BYTES = 1 << 20
MAX_BLOCK_TOKENS = 256  # as of `pool.block_size`: so many pieces a READ of unlike blocks may have
MAX_RANKS = 64

_MAY_DIFFER = {"tp_size", "tp_rank", "bridged_dtypes", "bridges_sizes"}
_ROUTERS_COMPARE = {"model_fingerprint", "kv_dtype", "block_size"}  # each by its own rule


def compatibility(
    model_fingerprint: str,
    kv_dtype: str,
    block_size: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    *,
    tp_size: int = 1,
    tp_rank: int = 0,
    verify: bool = True,
    draft_fingerprint: str | None = None,
    deterministic_split: str | None = None,
    bridged_dtypes: Sequence[str] = (),
    bridges_sizes: bool = False,
) -> handoff_pb2.Compatibility:
    """Return the properties that a pool must share with its peers, with this package's versions. A
    field that is None is absent in the message, where it reads as empty."""
    return handoff_pb2.Compatibility(
        protocol_version=PROTOCOL_VERSION,
        model_fingerprint=model_fingerprint,
        kv_dtype=kv_dtype,
        block_size=block_size,
        layout_version=LAYOUT_VERSION,
        checksum_algorithm=CHECKSUM_ALGORITHM,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tp_size=tp_size,
        tp_rank=tp_rank,
        verify=verify,
        draft_fingerprint=draft_fingerprint,
        deterministic_split=deterministic_split,
        bridged_dtypes=bridged_dtypes,
        bridges_sizes=bridges_sizes,
    )


def build(
    worker_id: str, pool: PeerPool, common: handoff_pb2.Compatibility, host: str | None = None
) -> handoff_pb2.HandshakeMessage:
    """Return a worker's handshake message; `pool` is its mover's description, `host` the same for
    all workers of a machine (see peers/host_id.py), None if not known."""
    return handoff_pb2.HandshakeMessage(
        worker_id=worker_id,
        boot_id=pool.boot_id,
        compatibility=common,
        host=host,
        pool=handoff_pb2.PoolDescription(
            mover=pool.mover,
            metadata=pool.metadata,
            base_address=pool.base_address,
            block_bytes=pool.block_bytes,
            num_blocks=pool.num_blocks,
            device_id=pool.device_id,
            memory=pool.memory,
            versions=pool.versions,
            rank_pools=[
                handoff_pb2.RankPoolDescription(
                    address=each.address, block_bytes=each.block_bytes, device_id=each.device_id
                )
                for each in pool.rank_pools
            ],
        ),
    )


def terms(message: handoff_pb2.HandshakeMessage) -> str:
    """Return all else that `check` wants to be equal, for a worker's hello: routers make no pair of
    workers whose terms differ, such as those of two versions in an upgrade."""
    common, pool = message.compatibility, message.pool
    names = (field.name for field in common.DESCRIPTOR.fields)
    named = [(n, getattr(common, n)) for n in names if n not in _MAY_DIFFER | _ROUTERS_COMPARE]
    named += [("mover", pool.mover), *sorted(pool.versions.items())]
    return ", ".join(f"{name} {value}" for name, value in named if value != "")  # "": absent


def check(mine: handoff_pb2.HandshakeMessage, theirs: handoff_pb2.HandshakeMessage) -> None:
    """Raise Incompatible, with both workers and both values of every difference, unless KV may be
    transferred."""
    ours, other = mine.compatibility, theirs.compatibility
    ranked = bool(mine.pool.rank_pools or theirs.pool.rank_pools)
    bridged = not ranked and (
        ours.kv_dtype in other.bridged_dtypes and other.kv_dtype in ours.bridged_dtypes
    )
    other_size = ours.block_size != other.block_size
    sizes_fit = not other_size or (
        not ranked
        and ours.bridges_sizes
        and other.bridges_sizes
        and block_ratio(ours.block_size, other.block_size) is not None
    )
    fits = _MAY_DIFFER | ({"kv_dtype"} if bridged else set())
    fits |= {"block_size"} if sizes_fit else set()
    pairs = [
        (name, getattr(ours, name), getattr(other, name))
        for name in (field.name for field in ours.DESCRIPTOR.fields)
        if name not in fits
    ]
    pairs.append(("mover", mine.pool.mover, theirs.pool.mover))
    here_versions, there_versions = mine.pool.versions, theirs.pool.versions
    pairs += [
        (f"{library} version", here_versions.get(library, ""), there_versions.get(library, ""))
        for library in sorted({*here_versions, *there_versions})
    ]
    if ranked:
        pairs.append(("slab_bytes", _slab_bytes(mine), _slab_bytes(theirs)))
    elif (ours.tp_size == other.tp_size or other_size) and not bridged and sizes_fit:
        own_bytes = mine.pool.block_bytes * other.block_size // max(1, ours.block_size)
        pairs.append(("block_bytes", own_bytes, theirs.pool.block_bytes))
    wrong = [
        f"{name} {here!r} here, {there!r} there" for name, here, there in pairs if here != there
    ]
    if wrong:
        remarks = []
        if not bridged and ours.kv_dtype != other.kv_dtype:
            remarks.append(_conversions(ours, other))
        if not sizes_fit:
            remarks.append(_size_remedy(ours, other))
        raise Incompatible(f"{_pair(mine, theirs)}: {'; '.join(wrong)}{''.join(remarks)}")


def _pair(mine: handoff_pb2.HandshakeMessage, theirs: handoff_pb2.HandshakeMessage) -> str:
    """Name both workers: the message is read on either side."""
    return f"worker {theirs.worker_id} (there) does not fit worker {mine.worker_id} (here)"


def _slab_bytes(side: handoff_pb2.HandshakeMessage) -> int:
    """Return the bytes of one KV head in a block; 0 if heads do not divide over the ranks."""
    heads, pools = side.compatibility.kv_heads, side.pool.rank_pools
    try:
        held = len(heads_of(heads, max(1, len(pools)), 0))
    except ValueError:
        return 0
    return int(pools[0].block_bytes if pools else side.pool.block_bytes) // held


def _conversions(ours: handoff_pb2.Compatibility, other: handoff_pb2.Compatibility) -> str:
    """Return what each side converts KV to, which would have to be more."""
    here, there = (" or ".join(side.bridged_dtypes) or "nothing" for side in (ours, other))
    return f" (KV is converted to {here} here, to {there} there)"


def _size_remedy(ours: handoff_pb2.Compatibility, other: handoff_pb2.Compatibility) -> str:
    """Return why blocks of these sizes are not exchanged, and what to set."""
    own = [where for where, side in (("here", ours), ("there", other)) if not side.bridges_sizes]
    why = "neither divides the other"
    if own:
        why = f"KV of other sizes is not exchanged {' and '.join(own)}"
    remedy = "to the same" if own else "to the same, or so that one divides the other"
    return f" ({why}: set pool.block_size of both workers {remedy})"


def peer_pool(theirs: handoff_pb2.HandshakeMessage) -> PeerPool:
    """Return the peer's pool, for `Mover.connect`. Raises Incompatible if it is invalid."""
    pool = theirs.pool
    if len(theirs.boot_id) != BOOT_ID_BYTES:
        raise Incompatible(
            f"worker {theirs.worker_id} has a boot id of {len(theirs.boot_id)} bytes, not "
            f"{BOOT_ID_BYTES}"
        )
    if not pool.num_blocks or not pool.block_bytes:
        raise Incompatible(f"worker {theirs.worker_id} describes an empty pool")
    if pool.num_blocks > MAX_POOL_BLOCKS or len(pool.metadata) > MAX_METADATA_BYTES:
        raise Incompatible(
            f"worker {theirs.worker_id} describes {pool.num_blocks} blocks with "
            f"{len(pool.metadata)} bytes of metadata: the limits are {MAX_POOL_BLOCKS} blocks and "
            f"{MAX_METADATA_BYTES} bytes"
        )
    if (tokens := theirs.compatibility.block_size) > MAX_BLOCK_TOKENS:
        raise Incompatible(
            f"worker {theirs.worker_id} describes blocks of {tokens} tokens: the limit is "
            f"{MAX_BLOCK_TOKENS}"
        )
    if pool.memory not in MEMORY_KINDS:
        known = " and ".join(MEMORY_KINDS)
        raise Incompatible(
            f"worker {theirs.worker_id} has a pool in {pool.memory!r}; only {known} are supported"
        )
    if pool.base_address + pool.num_blocks * pool.block_bytes >= 1 << 64:
        raise Incompatible(f"worker {theirs.worker_id} describes a pool beyond 64-bit addresses")
    ranks = tuple(
        RankPool(each.address, each.block_bytes, each.device_id) for each in pool.rank_pools
    )
    _check_ranks(theirs, ranks)
    return PeerPool(
        boot_id=theirs.boot_id,
        mover=pool.mover,
        metadata=pool.metadata,
        base_address=pool.base_address,
        block_bytes=pool.block_bytes,
        num_blocks=pool.num_blocks,
        device_id=pool.device_id,
        memory=pool.memory,
        versions=dict(pool.versions),
        rank_pools=ranks,
        kv_heads=theirs.compatibility.kv_heads or 1,
    )


def _check_ranks(theirs: handoff_pb2.HandshakeMessage, ranks: Sequence[RankPool]) -> None:
    """Raise Incompatible for pools of ranks that cannot be those of the blocks described."""
    if len(ranks) > MAX_RANKS:
        raise Incompatible(
            f"worker {theirs.worker_id} describes {len(ranks)} ranks; the limit is {MAX_RANKS}"
        )
    sizes = {each.block_bytes for each in ranks}
    blocks = theirs.pool.num_blocks
    beyond = any(each.address + blocks * each.block_bytes >= 1 << 64 for each in ranks)
    if ranks and (
        beyond
        or len(sizes) > 1
        or sum(each.block_bytes for each in ranks) != theirs.pool.block_bytes
    ):
        raise Incompatible(
            f"worker {theirs.worker_id} describes {len(ranks)} ranks whose pools of "
            f"{sorted(sizes)} bytes a block do not make up its {theirs.pool.block_bytes}"
        )


def bridged_pool(
    mine: handoff_pb2.HandshakeMessage, theirs: handoff_pb2.HandshakeMessage
) -> PeerPool:
    """Same as `peer_pool` with what READs need from a peer that has passed `check` and stores KV in
    another dtype, or in blocks of another size: it converts whole blocks to the own dtype, of its
    own size. Raises Incompatible, with both sizes, if the peer's blocks are too small for its KV
    dtype."""
    ours, other = mine.compatibility, theirs.compatibility
    here, there = ours.kv_dtype, other.kv_dtype
    stored = (here, ours.block_size), (there, other.block_size)
    pool = as_read(peer_pool(theirs), mine.pool.block_bytes, *stored)
    unit = pool.unit_bytes
    if here != there and unit > most_targets(there, here) * pool.block_bytes:
        raise Incompatible(
            f"{_pair(mine, theirs)}: block_bytes {unit} of {here!r} here take "
            f"more than {most_targets(there, here)} of {pool.block_bytes} of {there!r} there"
        )
    return pool


def as_read(
    pool: PeerPool, own_bytes: int, here: tuple[str, int], there: tuple[str, int]
) -> PeerPool:
    """Return a peer's pool as a reader knows it whose blocks have `own_bytes`. `here` and `there`:
    KV dtype and block size of each, which fit."""
    ratio = block_ratio(there[1], here[1]) or ALIKE
    if here[0] == there[0] and ratio.alike:
        return pool
    return replace(
        pool,
        kv_dtype=None if here[0] == there[0] else there[0],
        block_size=0 if ratio.alike else there[1],
        unit_bytes=own_bytes * ratio.split // ratio.joined,
        ratio=ratio,
    )
