"""Chats of several turns: lengths, times, and which blocks their prompts have in common.

`from_trace` reads the Mooncake conversation trace (kvcache-ai/Mooncake, FAST25-release/traces,
Apache-2.0), whose `hash_ids` name each 512 tokens of a prompt with all before them. A request
continues the chat whose last prompt's full blocks it begins with. `synthetic` draws chats of the
same form. Block identities are made of hash ids: no tokens are drawn. Pure.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HASHED_TOKENS = 512  # of a hash id
MAX_TURNS = 8
COMMON_BLOCKS = 1  # hashed blocks that chats share, and which continue none


@dataclass(frozen=True, slots=True)
class Turn:
    at_s: float  # earliest arrival
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


@dataclass(slots=True)
class Chat:
    """`turns` in order; each prompt is a prefix of one stream of tokens, the last one's."""

    turns: list[Turn] = field(default_factory=list)
    _stream: list[bytes] = field(default_factory=list)  # identities of its full blocks

    def identities(self, number: int, tokens: int, block_size: int, chat: int) -> list[bytes]:
        """Return the identities of the full blocks of the first `tokens` tokens after turn
        `number`: of the stream as far as the next prompt confirms it, then of its own."""
        if not self._stream:
            self._stream = self._stream_identities(block_size)
        follows = number + 1 < len(self.turns)
        known = self.turns[number + 1 if follows else number].input_tokens
        found = self._stream[: min(known, tokens) // block_size]
        for index in range(len(found), tokens // block_size):
            name = (chat << 64) + (number << 32) + index
            found.append(b"o" + name.to_bytes(15, "big"))
        return found

    def _stream_identities(self, block_size: int) -> list[bytes]:
        longest = max(self.turns, key=lambda turn: turn.input_tokens)
        starts = range(0, longest.input_tokens - block_size + 1, block_size)
        return [
            ((longest.hash_ids[start // HASHED_TOKENS] << 16) + start % HASHED_TOKENS).to_bytes(
                16, "big"
            )
            for start in starts
        ]


def from_trace(path: Path, chats: int) -> list[Chat]:
    """Return the first chats of two to eight turns. Longer ones are divided. Raises ValueError if
    there are fewer."""
    with path.open() as lines:
        turns = [_turn(json.loads(line)) for line in lines]
    found = [chat for chat in _chats(turns) if len(chat.turns) > 1]
    if len(found) < chats:
        raise ValueError(f"{path} has {len(found)} chats of two turns or more, not {chats}")
    return found[:chats]


def _turn(row: dict[str, list[int] | int]) -> Turn:
    at_ms, tokens, output, names = (
        row[key] for key in ("timestamp", "input_length", "output_length", "hash_ids")
    )
    assert isinstance(at_ms, int) and isinstance(tokens, int)
    assert isinstance(output, int) and isinstance(names, list)
    return Turn(at_ms / 1000, tokens, output, tuple(names))


def _chats(turns: Iterable[Turn]) -> list[Chat]:
    chats: list[Chat] = []
    open_: dict[tuple[int, ...], Chat] = {}  # by the full blocks of the last prompt
    for turn in turns:
        lengths = range(len(turn.hash_ids), COMMON_BLOCKS, -1)
        known = next((n for n in lengths if turn.hash_ids[:n] in open_), None)
        if known is None:
            chat = Chat()
            chats.append(chat)
        else:
            chat = open_.pop(turn.hash_ids[:known])
        chat.turns.append(turn)
        full = turn.input_tokens // HASHED_TOKENS
        if len(chat.turns) < MAX_TURNS and full > COMMON_BLOCKS:
            open_[turn.hash_ids[:full]] = chat
    return chats


def synthetic(chats: int, seed: int = 1, chats_per_s: float = 2.0) -> list[Chat]:
    """Draw chats of two to eight turns: a common system prompt of 512 tokens, questions of 20 to
    2,000 tokens, answers of 10 to 600, half a minute between turns."""
    dice, names = random.Random(seed), iter(range(1, 1 << 40))
    made = []
    for number in range(chats):
        chat, stream, tokens = Chat(), [0], HASHED_TOKENS
        at_s = number / chats_per_s
        for _ in range(dice.randint(2, MAX_TURNS)):
            tokens += int(20 * 100 ** dice.random())
            output = dice.randint(10, 600)
            stream += [next(names) for _ in range(-(-tokens // HASHED_TOKENS) - len(stream))]
            chat.turns.append(Turn(at_s, tokens, output, tuple(stream)))
            tokens += output
            at_s += dice.expovariate(1 / 30)
        made.append(chat)
    return made


def least_tokens(chats: Sequence[Chat]) -> int:
    """Return how many prompt tokens have to be computed at least, in blocks of one token and with
    room for all KV: those that no earlier prompt and no answer of the chat has, but always one."""
    seen: set[int] = set()  # hash ids of full blocks
    known: dict[int, int] = {}  # tokens of each chat's stream that are computed or drawn
    total = 0
    arrivals = [
        (turn.at_s, number, index)
        for number, chat in enumerate(chats)
        for index, turn in enumerate(chat.turns)
    ]
    for _, number, index in sorted(arrivals):
        turn = chats[number].turns[index]
        full = turn.hash_ids[: turn.input_tokens // HASHED_TOKENS]
        shared = next((n for n, name in enumerate(full) if name not in seen), len(full))
        held = max(known.get(number, 0), shared * HASHED_TOKENS)
        total += turn.input_tokens - min(held, turn.input_tokens - 1)
        seen.update(full)
        known[number] = turn.input_tokens + turn.output_tokens - 1  # the last is never computed
    return total
