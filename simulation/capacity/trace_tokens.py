"""The tokens of a traced request, of which only the blocks' names are known.

The schedulers take lists of tokens. A prompt of 100,000 tokens needs no list of that length: here
a token's value is the number of its block, an output token's that of its request, and the slice of
a block is a short list that is equal for equal blocks. `TraceNames` gives the identities that a
trace states, so no token is hashed.

    block of the prompt   the trace's hash id, or a number of this request alone
    block with output     hash of (the block before, the request)
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, SupportsIndex

from baton.planner.traces import BLOCK_TOKENS, TraceRequest
from baton.runtime.identity import IDENTITY_BYTES

_OWN = 1 << 120  # names that a request shares with no other


def block_names(request: TraceRequest, number: int, size: int = BLOCK_TOKENS) -> list[bytes]:
    """Return the identities of all blocks of `size` tokens of the prompt, the partial last one
    included. A block of the trace has the same parts in each prompt that has it; a block of several
    of the trace's has the name of the last one, which names its whole prefix."""
    count, parts = -(-request.prompt_tokens // size), request.block_tokens // size
    if parts:
        known = [each * parts + part for each in request.blocks for part in range(parts)][:count]
    else:
        step = size // request.block_tokens
        known = list(request.blocks[step - 1 :: step])
    names = [each.to_bytes(IDENTITY_BYTES, "big") for each in known]
    own = _OWN | number << 32
    return names + [
        (own | index).to_bytes(IDENTITY_BYTES, "big") for index in range(len(known), count)
    ]


class BlockTokens(list[int]):
    """A prompt, or a prompt and the output after it, that stores its blocks' names alone. Slices of
    it are plain lists; only the whole is a `BlockTokens` again. The base class stores nothing that
    is read, except by `array`, for which it has as many entries as a plain slice. Blocks have
    `size` tokens."""

    def __init__(
        self,
        names: list[bytes],
        prompt_tokens: int,
        output_tokens: int,
        owner: int,
        size: int = BLOCK_TOKENS,
    ):
        self.names = names
        self.size = size
        self._numbers = [int.from_bytes(name[-4:], "big") for name in names]
        self._length = prompt_tokens + output_tokens
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.owner = owner  # the value of each output token
        super().__init__(self._content(0, len(self)))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, slice):
            start, end, _ = index.indices(self._length)
            if end <= self.prompt_tokens and end - start < self._length:  # most slices
                return self._numbers[start // self.size : -(-end // self.size)]
            return self if start == 0 and end == self._length else self._content(start, end)
        position = index.__index__()
        if position >= self.prompt_tokens or position < 0:
            return self.owner
        return self._numbers[position // self.size]

    def __add__(self, output: list[Any]) -> Any:
        count = self.output_tokens + len(output)
        return BlockTokens(self.names, self.prompt_tokens, count, self.owner, self.size)

    def _content(self, start: int, end: int) -> list[int]:
        if end <= self.prompt_tokens:
            return self._numbers[start // self.size : -(-end // self.size)]
        content = self._numbers[start // self.size :]
        return content + [self.owner] * (end - max(start, self.prompt_tokens))


class TraceNames:
    """Implements `BlockNames` for `BlockTokens` and their slices."""

    def chain(self, parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
        assert isinstance(tokens, BlockTokens) and block_size == tokens.size
        names = tokens.names[: tokens.prompt_tokens // block_size]
        owner = [tokens.owner]
        while len(names) < len(tokens) // block_size:
            names.append(self.child(names[-1] if names else parent, owner))
        return names

    def child(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        return blake2b(parent + tokens[-1].to_bytes(8, "big"), digest_size=IDENTITY_BYTES).digest()
