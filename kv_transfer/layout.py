"""The layout of a KV block, and the bytes to transfer between any two tensor-parallel splits.

    pool of a rank   [block, bytes]
    block            = layer group of the target | layer group of its draft model   contiguous
    layer group      = head slab 0 | head slab 1 | ...
    slab             = [layer, k|v, token, head_dim] of one KV head, and the scales of its rows
                       [layer, k|v, token] if they are quantised

A rank holds a range of heads, so a transfer between splits is a few contiguous runs of slabs. With
more ranks than KV heads, several ranks hold the same head. An MLA model has one KV head and `sides`
= 1. If a draft model's heads do not divide over the ranks, every rank has all of them. The module
computes with unbounded Python integers and is pure.
"""

from __future__ import annotations

from dataclasses import dataclass

LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """KV of some layers in a block on one rank; `heads` are the KV heads that the rank holds."""

    heads: int
    layers: int
    block_size: int  # tokens
    head_dim: int
    item_bytes: int
    sides: int = 2  # K and V; MLA: 1
    scale_bytes: int = 0  # per row of head_dim; 0: no scales

    @property
    def slab_bytes(self) -> int:
        row_bytes = self.head_dim * self.item_bytes + self.scale_bytes
        return self.layers * self.sides * self.block_size * row_bytes

    @property
    def group_bytes(self) -> int:
        return self.heads * self.slab_bytes


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layer groups of a block on one rank, in their order: the target's, then the draft's."""

    groups: tuple[LayerGroup, ...]

    @property
    def block_bytes(self) -> int:
        return sum(group.group_bytes for group in self.groups)

    def offset(self, block: int, slab: int = 0, group: int = 0) -> int:
        """Return the bytes from the pool's start to a slab of a layer group of a block."""
        before = sum(other.group_bytes for other in self.groups[:group])
        return block * self.block_bytes + before + slab * self.groups[group].slab_bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive slabs of every block that a reader reads from one granter rank."""

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
    """Return the KV heads of the whole model that a rank holds.

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
    """Return the runs that a reader rank reads from each granter rank, in order of its own slabs.

    If several granter ranks hold the same head, its readers are distributed over them.
    """
    wanted = heads_of(kv_heads, reader_tp, reader_rank)
    copies = max(1, granter_tp // kv_heads)  # granter ranks that hold the same head
    width = max(1, kv_heads // granter_tp)  # heads of a granter rank
    heads_of(kv_heads, granter_tp, 0)  # raises for an impossible split
    found: list[Run] = []
    head = wanted.start
    while head < wanted.stop:
        owner = head // width
        stop = min(wanted.stop, (owner + 1) * width)
        rank = owner * copies + reader_rank % copies
        found.append(Run(rank, head - owner * width, head - wanted.start, stop - head))
        head = stop
    return tuple(found)


def draft_heads_of(kv_heads: int, tp_size: int, rank: int) -> range:
    """Same as `heads_of` for a draft model: all heads if they do not divide over the ranks."""
    divides = tp_size <= kv_heads and kv_heads % tp_size == 0
    return heads_of(kv_heads, tp_size, rank) if divides else range(kv_heads)


def draft_runs(kv_heads: int, reader_tp: int, reader_rank: int, granter_tp: int) -> tuple[Run, ...]:
    """Same as `runs` for a draft model. If granter ranks hold all heads, readers are distributed
    over them."""
    wanted = draft_heads_of(kv_heads, reader_tp, reader_rank)
    width = len(draft_heads_of(kv_heads, granter_tp, 0))
    if width == kv_heads:
        rank = reader_rank % granter_tp
        return (Run(rank, wanted.start, 0, len(wanted)),)
    found: list[Run] = []
    head = wanted.start
    while head < wanted.stop:
        rank = head // width
        stop = min(wanted.stop, (rank + 1) * width)
        found.append(Run(rank, head - rank * width, head - wanted.start, stop - head))
        head = stop
    return tuple(found)


def region(
    run: Run,
    granter: BlockLayout,
    granter_block: int,
    reader: BlockLayout,
    reader_block: int,
    group: int = 0,
) -> Region:
    """Return the bytes of one block that a run of a layer group transfers. Raises ValueError if
    the two slabs differ in size."""
    theirs, ours = granter.groups[group].slab_bytes, reader.groups[group].slab_bytes
    if theirs != ours:
        raise ValueError(f"slabs of {theirs} and {ours} bytes differ")
    return Region(
        granter.offset(granter_block, run.granter_slab, group),
        reader.offset(reader_block, run.reader_slab, group),
        run.slabs * ours,
    )
