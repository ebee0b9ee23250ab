"""Proposes the most frequent continuation, in the sequence and in its tenant's recent output.

SuffixDecoding (Oliaro et al., 2024, arXiv:2411.04975): agents and pipelines repeat what they wrote
for earlier requests. Each sequence searches two suffix trees: its own text, and the output of all
sequences of its tenant. A path follows the most frequent child of each node while the product of
the children's shares stays above a floor. A share counts one more unseen child (the escape of
prediction by partial matching), which weighs less the longer the match is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.speculation.ngram_proposer import SEQUENCE_TOKENS
from baton.engine.speculation.suffix_index import (
    LONGEST_MATCH,
    NOWHERE,
    SHORTEST_MATCH,
    Match,
    SuffixIndex,
)

TENANT_TOKENS = 1 << 16  # of recent output
MAX_TENANTS = 32  # whose output is kept while they have no sequence
PROBABILITY_FLOOR = 0.2
_SHARES_OF_MATCH = (1, 2, 4)  # nodes that are tried: whole match, half of it, a quarter
_LIKELY_SHARE = 0.8  # of `limit`, expected of a path: no other is tried


@dataclass(slots=True)
class _TenantOutput:
    index: SuffixIndex
    sequences: int = 0


@dataclass(frozen=True, slots=True)
class _Path:
    """Tokens, and how many of them are expected to be accepted."""

    tokens: list[int] = field(default_factory=list)
    expected: float = 0.0


class SuffixProposer:
    """Keeps `tenant_tokens` of each tenant's output, a power of two, and forgets the least recently
    active tenant once `most_tenants` others are idle. So memory is bounded by the tenants with
    sequences, the idle ones, and the sequences themselves."""

    name = "suffix"

    def __init__(self, tenant_tokens: int = TENANT_TOKENS, most_tenants: int = MAX_TENANTS) -> None:
        self._tenant_tokens, self._most_tenants = tenant_tokens, most_tenants
        self._active: dict[bytes, _TenantOutput] = {}
        self._idle: OrderedDict[bytes, _TenantOutput] = OrderedDict()  # least recent first

    @property
    def tenants(self) -> int:
        """How many tenants have output here."""
        return len(self._active) + len(self._idle)

    @property
    def tokens(self) -> int:
        """How many tokens of output are kept."""
        kept = [*self._active.values(), *self._idle.values()]
        return sum(len(output.index) for output in kept)

    def start(self, tenant: bytes, tokens: Sequence[int]) -> SuffixState:
        output = self._active.get(tenant) or self._idle.pop(tenant, None)
        output = self._active[tenant] = output or _TenantOutput(SuffixIndex(self._tenant_tokens))
        output.sequences += 1
        return SuffixState(self, tenant, output.index, tokens)

    def end(self, tenant: bytes) -> None:
        """End one sequence of a tenant."""
        output = self._active[tenant]
        output.sequences -= 1
        if output.sequences:
            return
        self._idle[tenant] = self._active.pop(tenant)
        if len(self._idle) > self._most_tenants:
            self._idle.popitem(last=False)


class SuffixState:
    """One sequence. `extend` costs O(1) a token; `propose` searches two indexes and follows three
    paths of `limit` tokens in each."""

    def __init__(
        self, owner: SuffixProposer, tenant: bytes, shared: SuffixIndex, tokens: Sequence[int]
    ) -> None:
        self._owner, self._tenant = owner, tenant
        self._own, self._shared = SuffixIndex(SEQUENCE_TOKENS), shared
        self._own_last = self._own.append(tokens)
        self._tail = list(tokens[-LONGEST_MATCH:])
        # so that its first output has a context
        self._shared_last = shared.append(self._tail[-SHORTEST_MATCH:])
        self._closed = False

    @property
    def visits(self) -> int:
        """How many positions and tokens the searches in both indexes have looked at."""
        return self._own.visits + self._shared.visits

    def extend(self, tokens: Sequence[int]) -> None:
        self._own_last = self._own.append(tokens, self._own_last)
        self._shared_last = self._shared.append(tokens, self._shared_last)
        self._tail = [*self._tail, *tokens[-LONGEST_MATCH:]][-LONGEST_MATCH:]

    def propose(self, limit: int) -> list[int]:
        own = _best_path(self._own, self._tail, self._own_last, limit)
        if own.expected >= _LIKELY_SHARE * limit:
            return own.tokens
        shared = _best_path(self._shared, self._tail, self._shared_last, limit)
        return max(own, shared, key=lambda path: path.expected).tokens

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._owner.end(self._tenant)


def _best_path(index: SuffixIndex, tail: Sequence[int], last: int, limit: int) -> _Path:
    """Return the path with the most expected tokens, from the nodes of `tail` and of shorter ends
    of it: a longer match is more telling, a shorter one has more positions."""
    matches = index.matches(tail)
    longest = max((match.length for match in matches), default=0)
    best = _Path()
    tried = 0
    for share in _SHARES_OF_MATCH:
        length = -(-longest // share)
        live = [match for match in matches if match.length >= length]
        if len(live) > tried:
            tried = len(live)
            path = _follow(index, live, length, last, limit)
            best = max(best, path, key=lambda found: found.expected)
        if best.expected >= _LIKELY_SHARE * limit:
            break
    return best


def _follow(index: SuffixIndex, matches: list[Match], length: int, last: int, limit: int) -> _Path:
    """Follow the most frequent children of the node at which `matches` are, of a string of
    `length` tokens. A position that reaches the end of the sequence, `last`, goes on in what is
    proposed behind it: its index there is counted down from -2."""
    positions = [match.position for match in matches]
    proposed: list[int] = []
    probability, expected = 1.0, 0.0
    while len(proposed) < limit and positions:
        children: list[tuple[int, int]] = []
        for position in positions:
            behind = _behind(index, position, last)
            if behind != NOWHERE:
                token = proposed[-2 - behind] if behind < NOWHERE else index.token(behind)
                children.append((token, behind))
        index.visits += len(positions)
        counts = Counter(token for token, _ in children)
        if not counts:
            break
        token, count = counts.most_common(1)[0]
        probability *= count / (len(children) + 1 / (length + len(proposed)))
        if probability < PROBABILITY_FLOOR:
            break
        expected += probability
        positions = [position for child, position in children if child == token]
        proposed.append(token)
    return _Path(proposed, expected)


def _behind(index: SuffixIndex, position: int, last: int) -> int:
    if position < NOWHERE:
        return position - 1
    behind = index.after(position)
    return -2 if behind == NOWHERE and position == last else behind
