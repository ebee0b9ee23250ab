"""The tree of the prefixes that recent prompts share, and which workers hold each part.

An identity names its whole prefix, so equal identities are equal places of the tree:

    prompt 1   a b c d          ab (3 prompts)
    prompt 2   a b c e    ──▶    ├─ c (2)
    prompt 3   a b f             │   ├─ d   └─ e
                                 └─ f

A node is a run of blocks that the same prompts contain. Pure; holds no token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MAX_NODES = 48
SHOWN_BYTES = 4  # of an identity

Node = dict[str, Any]


def prefix_tree(
    chains: Iterable[Sequence[bytes]],
    workers_with: Callable[[bytes], list[str]],
    max_nodes: int = MAX_NODES,
) -> list[Node]:
    """Return the nodes with the most blocks times prompts, and all above them, each behind its
    parent: depth, id, blocks, prompts, and the workers that hold it to its end."""
    prompts = [chain for chain in chains if chain]
    counts = Counter(identity for chain in prompts for identity in chain)
    nodes: dict[bytes, tuple[bytes | None, bytes, int]] = {}  # first block: parent, last, blocks
    for chain in prompts:
        parent: bytes | None = None
        begin = 0
        for at in range(1, len(chain) + 1):
            if at == len(chain) or counts[chain[at]] != counts[chain[begin]]:
                nodes.setdefault(chain[begin], (parent, chain[at - 1], at - begin))
                parent, begin = chain[begin], at
    heaviest = sorted(nodes, key=lambda first: -nodes[first][2] * counts[first])
    kept: set[bytes] = set()
    for first in heaviest:
        way = [first]
        while (above := nodes[way[-1]][0]) is not None and above not in kept:
            way.append(above)
        if len(kept) + len(way) > max_nodes:
            break
        kept.update(way)
    children: dict[bytes | None, list[bytes]] = {}
    for first in heaviest:
        if first in kept:
            children.setdefault(nodes[first][0], []).append(first)
    found: list[Node] = []
    stack = [(first, 0) for first in reversed(children.get(None, []))]
    while stack:
        first, depth = stack.pop()
        _, last, blocks = nodes[first]
        found.append(
            {
                "depth": depth,
                "id": first[:SHOWN_BYTES].hex(),
                "blocks": blocks,
                "prompts": counts[first],
                "holders": workers_with(last),
            }
        )
        stack += [(child, depth + 1) for child in reversed(children.get(first, []))]
    return found
