"""An `Engine` without a model: its next token is a hash of the exact KV bytes that it reads.

Computing a token writes a record of it into its block; drawing hashes every record of the
sequence, in order, out of the pool, and its history where the sampling asks for one. Any wrong,
stale, missing or misplaced block therefore changes the output, at microseconds a token.
`expected_draws` says what a correct run gives. Knows no time: virtual_steps.py does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from baton.engine.scheduling.batch import DraftWork, Draw, Drawn, Slice, StepBatch, extended
from baton.engine.scheduling.token_history import history_of
from baton.engine.scheduling.verification import accepted
from baton.runtime.sampling import SamplingParams
from baton.simulation.fleet.lab_vocabulary import END, FollowedMask
from baton.simulation.virtual.virtual_steps import VirtualSteps

RECORD_BYTES = 8
WIDE_BYTES = 16  # a record and its complement
DRAFT_ERRORS = 64  # of 256 proposals of a draft model


def block_bytes(block_size: int, slabs: int, *, wide: bool = False) -> int:
    return block_size * slabs * (WIDE_BYTES if wide else RECORD_BYTES)


def widened(records: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return records [bytes] in the wide form, each with its complement behind it."""
    each = records.reshape(-1, RECORD_BYTES)
    return np.concatenate([each, ~each], axis=1).ravel()


def narrowed(records: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the records of wide ones, [bytes]."""
    return records.reshape(-1, WIDE_BYTES)[:, :RECORD_BYTES].ravel()


class HashEngine(VirtualSteps):
    """`pool` is uint8 [blocks, block_bytes]; a step takes `step_s(batch)` of the loop's time."""

    def __init__(
        self,
        pool: NDArray[np.uint8],
        *,
        block_size: int,
        slabs: int,
        vocab_size: int,
        step_s: Callable[[StepBatch], float] = lambda batch: 0.0,
        drafts: bool = False,
        wide: bool = False,
    ) -> None:
        """`drafts`: a draft model proposes; its KV is one slab more, behind the others. `wide`: it
        stores each record with its complement, and reads both."""
        device = _HashDevice(pool, block_size, slabs, vocab_size, drafts, wide)
        super().__init__(device, step_s)


class _HashDevice:
    """Implements virtual_steps' `Device`."""

    def __init__(
        self,
        pool: NDArray[np.uint8],
        block_size: int,
        slabs: int,
        vocab_size: int,
        drafts: bool,
        wide: bool,
    ) -> None:
        self._pool = pool
        self._drafts = drafts
        self._wide = wide
        self._record_bytes = WIDE_BYTES if wide else RECORD_BYTES
        self._stride = (slabs + drafts) * block_size * self._record_bytes  # of a block
        # [blocks, slab, token, record], read and written in parts at less cost
        self._bytes = pool.reshape(-1).data
        self._block_size = block_size
        self._slabs = slabs
        self._all = range(slabs)
        self._width = block_size * self._record_bytes  # of a slab
        self._vocab_size = vocab_size

    def copy_block(self, source: int, target: int) -> None:
        self._pool[target] = self._pool[source]

    def compute(self, slices: Sequence[Slice]) -> list[tuple[Drawn, ...]]:
        drawn: list[tuple[Drawn, ...]] = []
        for piece in slices:
            self._write(piece.tokens, piece.start, piece.blocks)
            if piece.draft is not None and self._drafts:
                self._write_draft(piece.draft.missing, piece)
            if not piece.draws:
                drawn.append(())
                continue
            if piece.proposed:
                drawn.append(self._verify(piece))
                continue
            digest = self._read(piece.blocks, piece.start + len(piece.tokens))
            drawn.append(tuple([_drawn(digest, draw, self._vocab_size) for draw in piece.draws]))
        return drawn

    def compute_partly(self, slices: Sequence[Slice]) -> None:
        """Write the first rank's slab alone, behind what the draft model has written."""
        for piece in slices:
            if piece.draft is not None and self._drafts:
                self._write_draft(piece.draft.missing, piece)
            self._write(piece.tokens, piece.start, piece.blocks, range(1))

    def propose(self, slices: Sequence[Slice]) -> dict[int, tuple[int, ...]]:
        return {
            index: self._proposals(piece, piece.draft)
            for index, piece in enumerate(slices)
            if piece.draft is not None and piece.draft.tokens
        }

    def _proposals(self, piece: Slice, work: DraftWork) -> tuple[int, ...]:
        """Return the target's own draws, with an error wherever the draft's KV says so."""
        self._write_draft(work.missing, piece)
        held = self._held(piece.blocks, piece.start)
        tokens = list(piece.tokens)
        for draw in piece.draws[: work.tokens]:
            known, position = tokens[-1], piece.start + len(tokens) - 1
            held = [own + record(known, position, slab) for slab, own in enumerate(held)]
            token = _drawn(
                _digest(b"".join(held)), extended(draw, tokens[1:]), self._vocab_size
            ).token
            self._write([known], position, piece.blocks, range(self._slabs, self._slabs + 1))
            tokens.append(token ^ 1 if self._errs(piece.blocks, position + 1) else token)
        return tuple(tokens[1:])

    def _errs(self, blocks: Sequence[int], length: int) -> bool:
        (kept,) = self._held(blocks, length, range(self._slabs, self._slabs + 1))
        return _digest(kept).digest()[0] < DRAFT_ERRORS

    def _write_draft(self, missing: Sequence[int], piece: Slice) -> None:
        """Write the draft's KV of the tokens that lack it, and of the slice's."""
        tokens = (*missing, *piece.tokens)
        slab = range(self._slabs, self._slabs + 1)
        self._write(tokens, piece.start - len(missing), piece.blocks, slab)

    def _verify(self, piece: Slice) -> tuple[Drawn, ...]:
        """The draw of each token, from what the pool holds up to it."""
        found = []
        for length, draw in enumerate(piece.draws, piece.start + 1):
            found.append(_drawn(self._read(piece.blocks, length), draw, self._vocab_size))
        return accepted(piece, found)

    def _write(
        self,
        tokens: Sequence[int],
        start: int,
        blocks: Sequence[int],
        slabs: range | None = None,
    ) -> None:
        """Write the records of these slabs, or of all that are the target's."""
        width, content, size = self._width, self._bytes, self._record_bytes
        slabs = self._all if slabs is None else slabs
        stored = _wide_record if self._wide else record
        for position, token in enumerate(tokens, start=start):
            block, slot = divmod(position, self._block_size)
            at = blocks[block] * self._stride + slabs.start * width + slot * size
            for slab in slabs:
                content[at : at + size] = stored(token, position, slab)
                at += width

    def _read(self, blocks: Sequence[int], length: int) -> hashlib.blake2b:
        """Return the digest of the first `length` tokens in `blocks`, slab after slab."""
        return _digest(b"".join(self._held(blocks, length)))

    def _held(self, blocks: Sequence[int], length: int, slabs: range | None = None) -> list[bytes]:
        """Return the first `length` tokens' records in `blocks`, of each slab."""
        slabs = self._all if slabs is None else slabs
        table = blocks[: -(-length // self._block_size)]
        width, content, size = self._width, self._bytes, length * self._record_bytes
        starts = [block * self._stride + slabs.start * width for block in table]
        held = []
        for _ in slabs:
            held.append(b"".join([content[at : at + width] for at in starts])[:size])
            starts = [at + width for at in starts]
        return [_read_wide(records) for records in held] if self._wide else held


@lru_cache(maxsize=1 << 16)
def record(token: int, position: int, slab: int) -> bytes:
    """Return the record of a token in one slab."""
    return hashlib.blake2b(b"%d,%d,%d" % (token, position, slab), digest_size=8).digest()


@lru_cache(maxsize=1 << 16)
def _wide_record(token: int, position: int, slab: int) -> bytes:
    return widened(np.frombuffer(record(token, position, slab), np.uint8)).tobytes()


def _read_wide(records: bytes) -> bytes:
    """Return the records of wide ones; all of their bytes where a complement is wrong, so that any
    wrong byte changes what is drawn."""
    stored = np.frombuffer(records, np.uint8)
    plain = narrowed(stored)
    return plain.tobytes() if np.array_equal(widened(plain), stored) else records


def expected_draws(
    prompt: Sequence[int],
    count: int,
    params: SamplingParams,
    *,
    choice: int,
    slabs: int,
    vocab_size: int,
    grammar: str = "",
) -> list[Drawn]:
    """Return the draws of a run without a wrong block, to the end token where there is a grammar of
    the lab's vocabulary."""
    held = [
        bytearray(b"".join([record(token, at, slab) for at, token in enumerate(prompt)]))
        for slab in range(slabs)
    ]
    tokens, drawn = list(prompt), list[Drawn]()
    for _ in range(count):
        history = history_of(tokens, len(prompt)) if params.needs_history else None
        output = tokens[len(prompt) :]
        allowed = FollowedMask(grammar, vocab_size, output) if grammar else None
        draw = Draw(choice, len(tokens), params, history, allowed)
        drawn.append(_drawn(_digest(b"".join(held)), draw, vocab_size))
        token = drawn[-1].token
        if grammar and token == END:
            break
        for slab, records in enumerate(held):
            records += record(token, len(tokens), slab)
        tokens.append(token)
    return drawn


def expected_output(
    prompt: Sequence[int],
    count: int,
    params: SamplingParams,
    *,
    choice: int,
    slabs: int,
    vocab_size: int,
) -> list[int]:
    """The tokens of `expected_draws`."""
    drawn = expected_draws(prompt, count, params, choice=choice, slabs=slabs, vocab_size=vocab_size)
    return [one.token for one in drawn]


def _digest(content: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=8)


def _token(number: int, draw: Draw, vocab_size: int) -> int:
    """Return the token of this number, among those that the draw's grammar admits."""
    bits = None if draw.allowed is None else draw.allowed.bitmask()
    if bits is None:
        return number % vocab_size
    admitted = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))
    return int(admitted[number % len(admitted)])


def _drawn(digest: hashlib.blake2b, draw: Draw, vocab_size: int) -> Drawn:
    """Draw from the digest of what the pool holds of the sequence; the digest stays as it is."""
    params = draw.params
    if params.temperature > 0:
        digest = digest.copy()
        digest.update(b"%d,%d,%d" % (params.seed, draw.choice, draw.position))
    if draw.history is not None:
        digest = digest.copy()
        digest.update(repr((list(draw.history), draw.history.prompt_tokens)).encode())
    number = int.from_bytes(digest.digest(), "little")
    token, asked = _token(number, draw, vocab_size), params.top_logprobs
    if asked is None:
        return Drawn(draw.choice, token)
    logprob = -(number >> 48) / 4096
    best = tuple(((token + index) % vocab_size, logprob / (index + 2)) for index in range(asked))
    return Drawn(draw.choice, token, logprob, best)
