"""Decode credit: blocks for a prompt and its expected growth, promised before any prefill.

The module is pure arithmetic over the scheduler's groups and sequences. A sequence that outgrows
its promise counts with the blocks that it holds. Waiting grants (granted, not yet decoding) may
only use a share of the pool, so that decoding sequences can grow; one grant is always possible.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.decode_worker.sequences import Group, Sequence


def promise(group: Group, block_size: int, expected_growth_tokens: int) -> None:
    """Write each sequence's `promised` and `shared` blocks. The group's first sequence counts
    the common blocks, until `pass_on`; the others count only the blocks of their own."""
    full = len(group.tokens) // block_size
    for rank, sequence in enumerate(group.sequences):
        growth = min(expected_growth_tokens, sequence.growth_left)
        total = blocks_for(len(group.tokens) + growth, block_size)
        sequence.shared = 0 if rank == 0 else full
        sequence.counted_by = None if rank == 0 else group.sequences[0]
        sequence.promised = total - sequence.shared


def pass_on(leaver: Sequence) -> None:
    """Move the shared blocks to the credit of the next sibling, since this sequence frees its
    blocks and its siblings still hold the shared ones."""
    heirs = [s for s in leaver.request.sequences if s.counted_by is leaver and not s.ended]
    if not heirs:
        return
    first, *others = heirs
    first.promised, first.shared, first.counted_by = first.promised + first.shared, 0, None
    for sequence in others:
        sequence.counted_by = first


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def outstanding(sequences: Iterable[Sequence]) -> int:
    """Return the blocks that granted sequences hold or may still claim."""
    return sum(max(s.promised, len(s.blocks) - s.shared) for s in sequences if not s.ended)


def unallocated(running: Iterable[Sequence], granted: Iterable[Group]) -> int:
    """Return the promised blocks that are not allocated. Until its sequences run, a group holds
    the blocks of them all."""
    of_running = (max(0, s.promised - (len(s.blocks) - s.shared)) for s in running if not s.ended)
    of_granted = (max(0, g.promised - len(g.blocks) - len(g.spares)) for g in granted)
    return sum(of_running) + sum(of_granted)


def may_grant(
    group: Group,
    *,
    running: Iterable[Sequence],
    waiting_grants: Iterable[Group],
    usable_blocks: int,
    waiting_share: float,
) -> bool:
    """Return whether the group's promise fits beside all others.

    `usable_blocks` is the pool without its quarantine.
    """
    in_waiting = outstanding(s for g in waiting_grants for s in g.sequences)
    if in_waiting and in_waiting + group.promised > waiting_share * usable_blocks:
        return False
    return outstanding(running) + in_waiting + group.promised <= usable_blocks
