"""Where the bytes of a KV block are, and which of them move between any two tensor-parallel splits.

    pool of a rank   [block, kv_head, layer, k|v, token, head_dim]
    block            = head slab 0 | head slab 1 | ...          contiguous
    slab             = [layer, k|v, token, head_dim] of one KV head, and the scales of its rows
                       [layer, k|v, token] where they are kept in eight bits

A rank holds a run of heads, so a move between splits is a few contiguous runs of slabs. With
more ranks than KV heads each head is held by several ranks, alike. A model with one latent head
(MLA) is the case of one KV head and `sides` = 1. Pure integers; Python's have no 32-bit limit.
"""

from __future__ import annotations

from dataclasses import dataclass

LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The shape of a block on one rank; `heads` are the KV heads that the rank holds."""

    heads: int
    layers: int
    block_size: int  # tokens
    head_dim: int
    item_bytes: int
    sides: int = 2  # K and V; 1 for a latent head
    scale_bytes: int = 0  # of a row of head_dim; 0: rows have no scale

    @property
    def slab_bytes(self) -> int:
        row_bytes = self.head_dim * self.item_bytes + self.scale_bytes
        return self.layers * self.sides * self.block_size * row_bytes

    @property
    def block_bytes(self) -> int:
        return self.heads * self.slab_bytes

    def offset(self, block: int, slab: int = 0) -> int:
        """Bytes from the pool's start to a slab of a block."""
        return block * self.block_bytes + slab * self.slab_bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive slabs that a reader takes from one granter rank, in every block."""

    granter_rank: int
    granter_slab: int  # the first one, within the granter's block
    reader_slab: int  # the first one, within the reader's block
    slabs: int


@dataclass(frozen=True, slots=True)
class Region:
    """One descriptor of a READ, as offsets from the two pools' starts."""

    granter_offset: int
    reader_offset: int
    length: int


def heads_of(kv_heads: int, tp_size: int, rank: int) -> range:
    """The KV heads of the whole model that a rank holds.

    Raises ValueError unless one of `tp_size` and `kv_heads` divides the other.
    """
    if not 0 <= rank < tp_size or kv_heads < 1:
        raise ValueError(f"no rank {rank} of {tp_size} for {kv_heads} KV heads")
    if tp_size <= kv_heads:
        if kv_heads % tp_size:
            raise ValueError(f"{kv_heads} KV heads do not divide into {tp_size} ranks")
        width = kv_heads // tp_size
        return range(rank * width, (rank + 1) * width)
    if tp_size % kv_heads:
        raise ValueError(f"{tp_size} ranks do not divide among {kv_heads} KV heads")
    head = rank // (tp_size // kv_heads)
    return range(head, head + 1)


def runs(kv_heads: int, reader_tp: int, reader_rank: int, granter_tp: int) -> tuple[Run, ...]:
    """What a reader rank takes from which granter rank, in order of its own slabs.

    Where several granter ranks hold a head alike, readers that hold it spread over them.
    """
    wanted = heads_of(kv_heads, reader_tp, reader_rank)
    copies = max(1, granter_tp // kv_heads)  # granter ranks that hold the same head
    width = max(1, kv_heads // granter_tp)  # heads of a granter rank
    heads_of(kv_heads, granter_tp, 0)  # raises for a split that cannot be
    found: list[Run] = []
    head = wanted.start
    while head < wanted.stop:
        owner = head // width
        stop = min(wanted.stop, (owner + 1) * width)
        rank = owner * copies + reader_rank % copies
        found.append(Run(rank, head - owner * width, head - wanted.start, stop - head))
        head = stop
    return tuple(found)


def region(
    run: Run, granter: BlockLayout, granter_block: int, reader: BlockLayout, reader_block: int
) -> Region:
    """The bytes of one block that a run moves. The two slabs must be of one size."""
    if granter.slab_bytes != reader.slab_bytes:
        raise ValueError(f"slabs of {granter.slab_bytes} and {reader.slab_bytes} bytes differ")
    return Region(
        granter.offset(granter_block, run.granter_slab),
        reader.offset(reader_block, run.reader_slab),
        run.slabs * reader.slab_bytes,
    )
