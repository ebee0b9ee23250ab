"""Cached blocks that a worker grants to a reader: pinned at the opening, and nothing is computed.

    opening (cached_only) ─▶ match from `held_blocks` on, pin ─▶ Held ─▶ offer ─▶ end: unpin

It implements the granter's `GrantedPrompt`. Workers of both roles grant so. Blocks that have left
the cache since the router saw them are not offered: `Held` names how many there are.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from baton.kv_transfer.granter import Computed, Granted, GrantedPrompt
from baton.kv_transfer.peers.block_store import BlockStore
from baton.kv_transfer.peers.converted_prompt import Converter
from baton.proto import handoff_pb2
from baton.runtime import identity
from baton.runtime.errors import Draining, HandoffError, InvalidRequest
from baton.runtime.wire import ModelLimits, check_tokens


class CachedPrefix:
    """The leading blocks of one opening. `pinned` are those after the reader's own. `each`: the
    targets that a block needs to be converted for its reader; it is granted as far as there are
    some. 0: the reader stores KV as this worker does."""

    def __init__(
        self,
        store: BlockStore,
        request_id: str,
        tokens: Sequence[int],
        identities: Sequence[bytes],
        first: int,
        each: int = 0,
    ) -> None:
        self.request_id = request_id
        self.pinned = store.pin_cached(identities, tokens, first)
        if each:
            kept = min(len(self.pinned), store.available // each)
            store.unpin(self.pinned[kept:])
            del self.pinned[kept:]
        self.targets = store.pin_targets(each * len(self.pinned))
        self.on_end: Callable[[CachedPrefix], None] = CachedPrefix._unpin
        self._store = store
        end = first + len(self.pinned)
        self._events: list[Granted] = [handoff_pb2.Held(blocks=end)]
        if self.pinned:
            granted, names = tuple(self.pinned), tuple(identities[first:end])
            self._events.append(Computed(first, granted, names, targets=tuple(self.targets)))

    async def next(self) -> Granted | None:
        return self._events.pop(0) if self._events else None

    def end(self) -> None:
        self.on_end(self)

    def _unpin(self) -> None:
        self._store.unpin(self.pinned)
        self.pinned = []


class CachedGranter:
    """Admits the `cached_only` openings of one worker, until it drains. `room` returns how many
    blocks may be pinned now, for a grant that is converted or not: pins must not take what the
    worker has promised to its requests, nor targets what a request waits for."""

    def __init__(
        self,
        store: BlockStore,
        limits: ModelLimits,
        block_size: int,
        draining: asyncio.Event,
        room: Callable[[bool], int] = lambda converted: sys.maxsize,
        converter: Converter | None = None,
    ) -> None:
        self._store = store
        self._converter = converter
        self._limits = limits
        self._block_size = block_size
        self._draining = draining
        self._room = room

    def admit(self, opening: handoff_pb2.OpenHandoff) -> GrantedPrompt:
        """Pin what the pool holds of an opening's blocks. Raises Draining, InvalidRequest (it names
        the field), Incompatible (KV is not converted to the reader's), or HandoffError for a prompt
        that is to be computed."""
        limits, size = self._limits, self._block_size
        if self._draining.is_set():
            raise Draining("the worker is stopping")
        if not opening.cached_only:
            raise HandoffError("this worker computes no prompts for others: it is a decode worker")
        tokens = list(opening.tokens)
        if len(tokens) > limits.max_context or len(tokens) % size:
            raise InvalidRequest(
                f"{len(tokens)} tokens: not full blocks of {size}, or over the context of "
                f"{limits.max_context}",
                field="tokens",
            )
        check_tokens(tokens, "tokens", limits.vocab_size)
        if opening.held_blocks >= len(tokens) // size:
            raise InvalidRequest("held_blocks leaves nothing to grant", field="held_blocks")
        names = identity.chain(limits.key, limits.root(opening.cache_salt), tokens, size)
        converter, first = self._converter, opening.held_blocks
        each = converter.parts(opening) if converter is not None else 0
        end = first + max(0, self._room(each > 0)) // (1 + each)
        prefix = CachedPrefix(self._store, opening.request_id, tokens, names[:end], first, each)
        return prefix if converter is None else converter.granted(prefix, opening)
